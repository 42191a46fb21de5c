"""Kimi-Linear and Kimi K3: recurrent (KDA) and latent attention (MLA) layers, mixtures of experts, attention residuals.

A recurrent layer reads its slot's state and records what its rows would do to it; `record_commit` then replays the rows
that a step keeps. Where all rows are kept (prefill, decode) that follows at once, and layers share the buffers of the
records; in a verify graph it waits for the accepted count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash_core.formats import Format

from exporter.kimi_config import KimiConfig
from exporter.models.context import Forward, HiddenRows, PagedCache, StateRecord, StateSlots, TargetMemory
from exporter.program.builder import Program, Tensor
from exporter.weights import Raw
from runtime.ops import DType

HEAD_NAME = "target.head"


def state_slots(program: Program, config: KimiConfig, max_slots: int, act: DType) -> dict[int, StateSlots]:
    """Add the state buffers of every recurrent layer, one row per slot."""
    kda = config.kda
    return {i: StateSlots(program.state(f"slot_window.{i}", act, (max_slots, kda.conv_taps - 1, 3 * kda.width)),
                          program.state(f"slot_state.{i}", DType.F32,
                                        (max_slots, kda.num_heads, kda.head_dim, kda.head_dim)))
            for i in sorted(config.kda_layers)}


def record_layers(fwd: Forward, config: KimiConfig, memory: TargetMemory, tokens: Tensor, taps: Sequence[int], *,
                  undoable: bool) -> HiddenRows:
    """Record embedding and layers for the rows of `fwd`; cached rows of live rows are written.

    Args:
        tokens: i32 [rows].
        taps: layers whose output goes into the features: under attention residuals, the mixture that the next layer
            (or the final norm) reads.
        undoable: leave the states as they are, and return what would change them; otherwise commit every live row.
    """
    features = fwd.scratch("features", len(taps) * config.hidden_size) if taps else None
    stream = _Stream(fwd, config)
    stream.start(tokens)
    pending: list[StateRecord] = []
    for i in range(config.num_layers):
        here = f"target.layers.{i}"
        h = stream.read(f"{here}.self_attention_res")
        if i:
            fwd.tap(h, features, taps, i - 1)
        stream.close_block(i)
        x = fwd.rms_norm(h, f"{here}.input_norm", config.rms_norm_eps, "normed")
        if i in config.kda_layers:
            mixed, record = _kda(fwd, config, memory.states[i], x, i, suffix=f".{i}" if undoable else "")
            if undoable:
                pending.append(record)
            else:
                record_commit(fwd, config, memory, [record], fwd.rows.positions)
        else:
            mixed = _mla(fwd, config, memory.cache, x, i)
        stream.add(mixed, f"{here}.o")
        h = stream.read(f"{here}.mlp_res")
        x = fwd.rms_norm(h, f"{here}.mlp_norm", config.rms_norm_eps, "normed")
        if i in config.moe_layers:
            stream.add_delta(_moe(fwd, config, x, here), here)
        else:
            stream.add(_gated(fwd, config, x, here), f"{here}.down")
    h = stream.read("target.output_res")
    fwd.tap(h, features, taps, config.num_layers - 1)
    return HiddenRows(h, features, tuple(pending))


def record_commit(fwd: Forward, config: KimiConfig, memory: TargetMemory, records: Sequence[StateRecord],
                  positions: Tensor) -> None:
    """Move states on by the rows whose entry in `positions`, i32 [rows], is not -1."""
    rows, kda = fwd.rows, config.kda
    for record in records:
        slots, label = memory.states[record.layer_idx], f"target.layers.{record.layer_idx}"
        where = {"positions": positions, "slots": rows.slots}
        fwd.graph.call("dflash.conv_window/1", {"x": record.inputs, "window": slots.window, **where}, label=label,
                       channels=3 * kda.width, history=kda.conv_taps - 1, act=fwd.act, **_groups(fwd, slots))
        fwd.graph.call("dflash.kda_commit/1",
                       {"keys": record.keys, "changes": record.changes, "log_decay": record.log_decay,
                        "state": slots.state, **where}, label=label, **_groups(fwd, slots), **_kda_heads(config))


@dataclass(slots=True)
class _Stream:
    """What the layers add to: one running sum, and before it the closed sums of earlier blocks of layers.

    All of them lie one after the other in one buffer, so that closing a block copies nothing: the next addition starts
    the next place. Without attention residuals nothing is ever closed.
    """

    fwd: Forward
    config: KimiConfig
    parts: Tensor = field(init=False)
    closed: int = 0
    is_empty: bool = False

    def __post_init__(self) -> None:
        block, rows = self.config.residual_block, self.fwd.rows.count
        places = 1 if block is None else 1 + -(-self.config.num_layers // block)
        self.parts = self.fwd.scratch("residual", self.config.hidden_size, rows=places * rows)

    @property
    def running(self) -> Tensor:
        rows = self.fwd.rows.count
        return self.parts.rows(self.closed * rows, rows)

    def start(self, tokens: Tensor) -> None:
        self.fwd.embedding(tokens, "target.embedding", self.running)

    def read(self, name: str) -> Tensor:
        """What a sublayer reads, before its norm."""
        if not self.closed:
            return self.running
        fwd, count = self.fwd, 1 + self.closed
        out = fwd.scratch("residual_mix", self.config.hidden_size)
        norm, score = fwd.plain(f"{name}_norm"), fwd.plain(f"{name}_proj")
        fwd.graph.call("dflash.residual_mix/1",
                       {"x": self.parts.rows(0, count * fwd.rows.count), "norm": norm, "score": score, "out": out},
                       label=name, parts=count, rows=fwd.rows.count, cols=self.config.hidden_size,
                       eps=self.config.rms_norm_eps, act=fwd.act, w=norm.dtype)
        return out

    def close_block(self, layer_idx: int) -> None:
        block = self.config.residual_block
        if block is not None and layer_idx % block == 0:
            self.closed += 1
            self.is_empty = True

    def add(self, x: Tensor, weight: str) -> None:
        """Add weight @ x."""
        if self.is_empty:
            self.fwd.linear(x, weight, self.running)
            self.is_empty = False
        else:
            self.add_delta(self.fwd.linear(x, weight, "delta"), weight)

    def add_delta(self, delta: Tensor, label: str) -> None:
        assert not self.is_empty, label
        self.fwd.add(self.running, delta, label)


def _groups(fwd: Forward, slots: StateSlots) -> dict[str, int]:
    return {"groups": fwd.rows.groups, "block_rows": fwd.rows.block_rows, "max_slots": slots.state.shape[0]}


def _kda_heads(config: KimiConfig) -> dict[str, int]:
    return {"heads": config.kda.num_heads, "head_dim": config.kda.head_dim}


def _kda(fwd: Forward, config: KimiConfig, slots: StateSlots, x: Tensor, layer_idx: int, *,
         suffix: str) -> tuple[Tensor, StateRecord]:
    """A recurrent layer's output before its last projection, and what its rows would do to the state.

    Args:
        suffix: of the buffers that a later commit reads.
    """
    here, kda, rows = f"target.layers.{layer_idx}", config.kda, fwd.rows
    width, where = kda.width, {"positions": rows.positions, "slots": rows.slots}
    inputs = fwd.linear(x, f"{here}.kda_qkv", f"kda_inputs{suffix}")
    gate_rows = width if kda.full_rank_gate else kda.head_dim
    parts = {"gate": (0, gate_rows), "decay": (gate_rows, kda.head_dim),
             "beta": (gate_rows + kda.head_dim, kda.num_heads)}
    gate, decay, beta = (fwd.linear(x, f"{here}.kda_gates", f"kda_{n}_in", part=part) for n, part in parts.items())
    decay = fwd.linear(decay, f"{here}.f_b", "kda_decay")
    if not kda.full_rank_gate:
        gate = fwd.linear(gate, f"{here}.g_b", "kda_gate")

    conv = fwd.plain(f"{here}.conv")
    qkv = fwd.scratch("kda_qkv", 3 * width)
    fwd.graph.call("dflash.short_conv/1",
                   {"x": inputs, "window": slots.window, "weight": conv, "out": qkv, **where}, label=here,
                   channels=3 * width, history=kda.conv_taps - 1, act=fwd.act, w=conv.dtype, **_groups(fwd, slots))
    a_log, dt_bias = fwd.plain(f"{here}.a_log"), fwd.plain(f"{here}.dt_bias")
    a_log = a_log.reshape(a_log.nbytes * 8 // a_log.dtype.bits).rows(0, kda.num_heads)  # published with padding
    log_decay = fwd.scratch(f"kda_log_decay{suffix}", width, dtype=DType.F32)
    strength = fwd.scratch("kda_strength", kda.num_heads, dtype=DType.F32)
    fwd.graph.call("dflash.kda_gates/1",
                   {"decay": decay, "beta": beta, "a_log": a_log, "dt_bias": dt_bias, "log_decay": log_decay,
                    "strength": strength}, label=here, rows=rows.count, lower_bound=kda.lower_bound or 0.0,
                   act=fwd.act, a_w=a_log.dtype, bias_w=dt_bias.dtype, **_kda_heads(config))
    out, keys, changes = (fwd.scratch(name, width, dtype=DType.F32)
                          for name in ("kda_out", f"kda_keys{suffix}", f"kda_changes{suffix}"))
    fwd.graph.call("dflash.kda_scan/1",
                   {"qkv": qkv, "log_decay": log_decay, "strength": strength, "state": slots.state, "out": out,
                    "keys": keys, "changes": changes, **where}, label=here, act=fwd.act, **_groups(fwd, slots),
                   **_kda_heads(config))
    norm = fwd.plain(f"{here}.o_norm")
    mixed = fwd.scratch("mixed", width)
    fwd.graph.call("dflash.gated_norm/1", {"x": out, "gate": gate, "weight": norm, "out": mixed}, label=here,
                   rows=rows.count, eps=config.rms_norm_eps, act=fwd.act, w=norm.dtype, **_kda_heads(config))
    return mixed, StateRecord(layer_idx, inputs, keys, changes, log_decay)


def _mla(fwd: Forward, config: KimiConfig, cache: PagedCache, x: Tensor, layer_idx: int) -> Tensor:
    """A latent attention layer's output before its last projection."""
    here, mla, rows = f"target.layers.{layer_idx}", config.mla, fwd.rows
    query_rows = mla.q_width if mla.q_rank is None else mla.q_rank
    q = fwd.linear(x, f"{here}.mla_in", "mla_q_in", part=(0, query_rows))
    kv_a = fwd.linear(x, f"{here}.mla_in", "mla_kv_a", part=(query_rows, mla.row_width))
    if mla.q_rank is not None:
        q = fwd.linear(fwd.rms_norm(q, f"{here}.q_norm", mla.latent_eps, "mla_q_normed"), f"{here}.q_b", "mla_q")
    kv_norm, kv_b = fwd.plain(f"{here}.kv_norm"), fwd.plain(f"{here}.kv_b")
    kv = cache.layer(config.mla_layers.index(layer_idx))
    where = {"positions": rows.positions, "slots": rows.slots, "page_table": cache.page_table, "kv": kv}
    grouped = {"groups": rows.groups, "block_rows": rows.block_rows, "rank": mla.kv_rank, "rope_dim": mla.rope_dim,
               "act": fwd.act, **cache.scalars()}
    fwd.graph.call("dflash.latent_cache/1", {"kv_a": kv_a, "weight": kv_norm, **where}, label=here,
                   eps=mla.latent_eps, w=kv_norm.dtype, **grouped)
    heads = {"rows": rows.count, "heads": mla.num_heads, "rank": mla.kv_rank, "nope_dim": mla.nope_dim,
             "rope_dim": mla.rope_dim, "v_dim": mla.v_dim, "act": fwd.act, "w": kv_b.dtype}
    absorbed = fwd.scratch("mla_absorbed", mla.num_heads * mla.row_width)
    fwd.graph.call("dflash.absorb_query/1", {"q": q, "kv_b": kv_b, "out": absorbed}, label=here, **heads)
    latent = fwd.scratch("mla_latent", mla.num_heads * mla.kv_rank)
    fwd.graph.call("dflash.latent_attention/1", {"q": absorbed, "out": latent, **where}, label=here,
                   heads=mla.num_heads, scale=(mla.nope_dim + mla.rope_dim) ** -0.5, **grouped)
    values = fwd.scratch("mla_values", mla.num_heads * mla.v_dim)
    fwd.graph.call("dflash.expand_values/1", {"x": latent, "kv_b": kv_b, "out": values}, label=here, **heads)
    if not mla.output_gate:
        return values
    gate = fwd.linear(x, f"{here}.mla_in", "mla_gate", part=(query_rows + mla.row_width, values.shape[1]))
    mixed = fwd.scratch("mixed", values.shape[1])
    fwd.graph.call("dflash.sigmoid_mul/1", {"x": values, "gate": gate, "out": mixed}, label=here, rows=rows.count,
                   cols=values.shape[1], act=fwd.act)
    return mixed


def _gated(fwd: Forward, config: KimiConfig, x: Tensor, prefix: str) -> Tensor:
    """act(gate x, up x), before the down projection."""
    gate_up = fwd.linear(x, f"{prefix}.gate_up", "gate_up")
    cols = gate_up.shape[1] // 2
    gated = fwd.scratch("gated", cols)
    operands, shape = {"gate_up": gate_up, "out": gated}, {"rows": fwd.rows.count, "cols": cols, "act": fwd.act}
    if config.situ_beta:
        fwd.graph.call("dflash.situ_mul/1", operands, label=prefix, situ_beta=config.situ_beta,
                       situ_linear_beta=config.situ_linear_beta, **shape)
    else:
        fwd.graph.call("dflash.silu_mul/1", operands, label=prefix, **shape)
    return gated


def _moe(fwd: Forward, config: KimiConfig, x: Tensor, here: str) -> Tensor:
    """A mixture's whole output: routed experts, through their latent width where there is one, and shared experts."""
    moe, rows = config.moe, fwd.rows.count
    logits = fwd.linear(x, f"{here}.router", "router_logits", result=DType.F32)
    bias = fwd.plain(f"{here}.router_bias")
    ids = fwd.scratch("expert_ids", moe.top_k, dtype=DType.I32)
    weights = fwd.scratch("expert_weights", moe.top_k, dtype=DType.F32)
    fwd.graph.call("dflash.route/1", {"logits": logits, "bias": bias, "ids": ids, "weights": weights}, label=here,
                   rows=rows, experts=moe.num_experts, top_k=moe.top_k, groups=moe.num_groups,
                   top_groups=moe.top_groups, renormalize=int(moe.renormalize), scale=moe.scale, w=bias.dtype)
    z = x if moe.latent is None else fwd.linear(x, f"{here}.latent_down", "latent")
    routed = _experts(fwd, config, z, ids, weights, here)
    if moe.latent is not None:
        if moe.latent_norm:
            routed = fwd.rms_norm(routed, f"{here}.latent_norm", config.rms_norm_eps, "latent_normed")
        routed = fwd.linear(routed, f"{here}.latent_up", "delta")
    shared = fwd.linear(_gated(fwd, config, x, f"{here}.shared"), f"{here}.shared.down", "shared_delta")
    fwd.add(routed, shared, f"{here}.shared")
    return routed


def _experts(fwd: Forward, config: KimiConfig, z: Tensor, ids: Tensor, weights: Tensor, here: str) -> Tensor:
    moe = config.moe
    gate_up, down = fwd.weight(f"{here}.experts.gate_up"), fwd.weight(f"{here}.experts.down")
    out = fwd.scratch("routed", z.shape[1])
    operands = {"x": z, "positions": fwd.rows.positions, "ids": ids, "weights": weights, "gate_up": gate_up.codes,
                "down": down.codes, "out": out}
    shape: dict[str, int | float] = {
        "rows": fwd.rows.count, "width": z.shape[1], "inner": moe.inner, "experts": moe.num_experts,
        "top_k": moe.top_k, "situ_beta": config.situ_beta, "situ_linear_beta": config.situ_linear_beta,
        "act": fwd.act}
    if gate_up.format in (Format.BF16, Format.F32):
        fwd.graph.call("dflash.experts/1", operands, label=here, w=gate_up.codes.dtype, **shape)
        return out
    is_nvfp4 = fwd.weight(f"{here}.experts.gate_up_scale").format is Raw.F8_E4M3
    scales = {f"{n}_{scale}": fwd.weight(f"{here}.experts.{n}_{scale}").codes for n in ("gate_up", "down")
              for scale in ("scale", *(["global"] if is_nvfp4 else []))}
    op = "dflash.experts_nvfp4/1" if is_nvfp4 else "dflash.experts_mxfp4/1"
    fwd.graph.call(op, {**operands, **scales}, label=here, **shape)
    return out
