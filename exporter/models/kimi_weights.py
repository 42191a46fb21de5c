"""Every weight that the graphs of a Kimi text model read, and the checkpoint tensors that it is stored from.

Matrices that read the same rows are stored as one: q, k and v of a recurrent layer; its gate, decay and strength
projections; query, latent and gate of an attending layer. `kv_b` stays as the checkpoint has it, in every scope: both
of its halves are absorbed, and one of them contracts over rows, along which a block format has no blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dflash_core.errors import CheckpointError
from dflash_core.formats import Format

from exporter.convert.packed import PackedFormat, PackedWeight
from exporter.kimi_config import KimiConfig
from exporter.plan import PlannedTensor
from exporter.weights import GlobalScale, Raw, WeightSpec

HEAD = "lm_head.weight"
VISION = ("vision_tower.", "mm_projector.")
CODES, BLOCK_SCALES, GLOBAL_SCALE = range(3)  # parts of a published 4-bit weight, in the order in which it lists them

_GLOBAL_RECIPES = {GlobalScale.MULTIPLIES: "keep-rows/1", GlobalScale.DIVIDES: "reciprocal-rows/1"}


def weight_specs(config: KimiConfig, planned: Mapping[str, PlannedTensor],
                 packed: Mapping[str, PackedWeight]) -> list[WeightSpec]:
    """Every weight, in storage order.

    Args:
        planned: the target's tensors by the name that the recipe's rows give them.
        packed: published block-format weights by their planned name.
    Raises:
        CheckpointError: TENSORS when a tensor that the config promises is missing, or one is left that no graph reads;
            EXPERT_FORMAT when the routed experts of a layer are not all of one format that is computed.
    """
    specs = _Specs(planned, packed)
    specs.add("embedding", "embed_tokens.weight")
    for i in range(config.num_layers):
        here = f"layers.{i}"
        specs.add(f"{here}.input_norm", f"{here}.input_layernorm.weight")
        if i in config.kda_layers:
            _kda(specs, config, here)
        else:
            _mla(specs, config, here)
        specs.add(f"{here}.mlp_norm", f"{here}.post_attention_layernorm.weight")
        if i in config.moe_layers:
            _moe(specs, config, here)
        else:
            _mlp(specs, here, specs.spelling(f"{here}.mlp", f"{here}.block_sparse_moe"))
        if config.residual_block is not None:
            for side in ("self_attention_res", "mlp_res"):
                specs.add(f"{here}.{side}_norm", f"{here}.{side}_norm.weight")
                specs.add(f"{here}.{side}_proj", f"{here}.{side}_proj.weight")
    if config.residual_block is not None:
        specs.add("output_res_norm", "output_attn_res_norm.weight")
        specs.add("output_res_proj", "output_attn_res_proj.weight")
    specs.add("norm", "norm.weight")
    specs.add("head", HEAD)
    return specs.finish()


def _kda(specs: _Specs, config: KimiConfig, here: str) -> None:
    at = f"{here}.self_attn"
    gate = "g" if config.kda.full_rank_gate else "g_a"
    specs.add(f"{here}.kda_qkv", *(f"{at}.{n}_proj.weight" for n in "qkv"))
    specs.add(f"{here}.kda_gates", *(f"{at}.{n}_proj.weight" for n in (gate, "f_a", "b")))
    specs.add(f"{here}.f_b", f"{at}.f_b_proj.weight")
    if not config.kda.full_rank_gate:
        specs.add(f"{here}.g_b", f"{at}.g_b_proj.weight")
    specs.add(f"{here}.conv", *(f"{at}.{n}_conv1d.weight" for n in "qkv"))
    specs.add(f"{here}.a_log", f"{at}.A_log")
    specs.add(f"{here}.dt_bias", f"{at}.dt_bias")
    specs.add(f"{here}.o_norm", f"{at}.o_norm.weight")
    specs.add(f"{here}.o", f"{at}.o_proj.weight")


def _mla(specs: _Specs, config: KimiConfig, here: str) -> None:
    at = f"{here}.self_attn"
    query = "q_proj" if config.mla.q_rank is None else "q_a_proj"
    gate = ("g_proj",) if config.mla.output_gate else ()
    specs.add(f"{here}.mla_in", *(f"{at}.{n}.weight" for n in (query, "kv_a_proj_with_mqa", *gate)))
    if config.mla.q_rank is not None:
        specs.add(f"{here}.q_norm", f"{at}.q_a_layernorm.weight")
        specs.add(f"{here}.q_b", f"{at}.q_b_proj.weight")
    specs.add(f"{here}.kv_norm", f"{at}.kv_a_layernorm.weight")
    specs.add(f"{here}.kv_b", f"{at}.kv_b_proj.weight")
    specs.add(f"{here}.o", f"{at}.o_proj.weight")


def _mlp(specs: _Specs, here: str, at: str) -> None:
    specs.add(f"{here}.gate_up", f"{at}.gate_proj.weight", f"{at}.up_proj.weight")
    specs.add(f"{here}.down", f"{at}.down_proj.weight")


def _moe(specs: _Specs, config: KimiConfig, here: str) -> None:
    at = f"{here}.block_sparse_moe"
    specs.add(f"{here}.router", f"{at}.gate.weight")
    specs.add(f"{here}.router_bias", f"{at}.gate.e_score_correction_bias")
    if config.moe.latent is not None:
        specs.add(f"{here}.latent_down", f"{at}.routed_expert_down_proj.weight")
    experts = [f"{at}.experts.{e}" for e in range(config.moe.num_experts)]
    specs.add_experts(f"{here}.experts.gate_up", [(f"{e}.w1.weight", f"{e}.w3.weight") for e in experts])
    specs.add_experts(f"{here}.experts.down", [(f"{e}.w2.weight",) for e in experts])
    if config.moe.latent is not None:
        if config.moe.latent_norm:
            specs.add(f"{here}.latent_norm", f"{at}.routed_expert_norm.weight")
        specs.add(f"{here}.latent_up", f"{at}.routed_expert_up_proj.weight")
    _mlp(specs, f"{here}.shared", f"{at}.shared_experts")


class _Specs:
    """Collects specs and claims their sources."""

    def __init__(self, planned: Mapping[str, PlannedTensor], packed: Mapping[str, PackedWeight]) -> None:
        self._planned, self._packed = planned, packed
        self._specs: list[WeightSpec] = []
        self._missing: list[str] = []
        self._claimed: set[str] = set()

    def spelling(self, *prefixes: str) -> str:
        """The first of these prefixes under which an MLP is there."""
        return next((p for p in prefixes if f"{p}.gate_proj.weight" in self._planned), prefixes[0])

    def add(self, name: str, *sources: str) -> None:
        """A weight of its sources' own format: the rows of all of them, in order."""
        found = self._claim(sources)
        if found:
            assert isinstance(found[0].format, Format), name
            self._append(name, [t.source for t in found], found[0].format, [t.shape for t in found])

    def add_experts(self, name: str, experts: Sequence[tuple[str, ...]]) -> None:
        """Routed experts of one format: plain; or MXFP4 or NVFP4 as published, with scales as weights beside the codes.

        Args:
            experts: each one's tensors.
        """
        found = self._claim([source for expert in experts for source in expert])
        if not found:
            return
        weights = [self._packed[t.name] for t in found if t.name in self._packed]
        spellings = {weight.global_scale for weight in weights}
        formats = {t.format for t in found}
        if (len(formats) > 1 or len(spellings) > 1
                or not formats <= {Format.BF16, Format.F32, PackedFormat.MXFP4, PackedFormat.NVFP4}):
            raise CheckpointError(
                "EXPERT_FORMAT", "routed experts are in a format that is not computed", where=name,
                expected="all in bf16, all in f32, all in mxfp4 or all in nvfp4, in one spelling",
                got=" and ".join(sorted({f.value for f in formats if f is not None}
                                        | {f"a global scale that {s.value}" for s in spellings if s is not None})),
                hint="export from the checkpoint in one of these formats")
        fmt = formats.pop()
        if isinstance(fmt, Format):
            self._append(name, [t.source for t in found], fmt, [t.shape for t in found])
            return
        assert fmt is not None, name
        scale = Raw.F8_E4M3 if fmt is PackedFormat.NVFP4 else Raw.U8
        for suffix, part, raw in (("", CODES, Raw.U8), ("_scale", BLOCK_SCALES, scale)):
            entries = [weight.parts[part] for weight in weights]
            self._append(name + suffix, [e.name for e in entries], raw, [e.shape for e in entries],
                         recipe=f"keep-rows/1+{fmt.view_format}")
        applied = spellings.pop()
        if applied is not None:
            each = len(experts[0])
            self._specs.append(WeightSpec(
                name=f"target.{name}_global", blob="target", owner="target", checkpoint="target",
                sources=tuple(weight.parts[GLOBAL_SCALE].name for weight in weights),
                recipe=f"{_GLOBAL_RECIPES[applied]}+{fmt.view_format}", format=Format.F32,
                shape=(len(experts), each) if each > 1 else (len(experts),), global_scale=applied))

    def finish(self) -> list[WeightSpec]:
        left = [t.source for bare, t in self._planned.items()
                if bare not in self._claimed and t.format is not None and not bare.startswith(VISION)]
        if self._missing or left:
            raise CheckpointError(
                "TENSORS", "checkpoint does not hold exactly the tensors that its config describes",
                expected="the tensors of the layers that config.json describes",
                got="; ".join(f"{kind}: {', '.join(names[:12])}" for kind, names in (
                    ("missing", self._missing), ("read by no graph", left)) if names),
                hint="config.json and weights are of two models, or the model is a variant that is not supported")
        return self._specs

    def _claim(self, sources: Sequence[str]) -> list[PlannedTensor]:
        """The planned tensors of these names; none when one is missing, which `finish` reports."""
        self._claimed |= set(sources)
        missing = [s for s in sources if s not in self._planned]
        self._missing += missing
        return [] if missing else [self._planned[s] for s in sources]

    def _append(self, name: str, sources: Sequence[str], fmt: Format | Raw, shapes: Sequence[tuple[int, ...]], *,
                recipe: str = "") -> None:
        shape = (sum(s[0] for s in shapes), *shapes[0][1:])
        made = recipe or ("copy/1" if len(sources) == 1 else "concat-rows/1")
        self._specs.append(WeightSpec(name=f"target.{name}", blob="target", owner="target", checkpoint="target",
                                      sources=tuple(sources), recipe=made, format=fmt, shape=shape))
