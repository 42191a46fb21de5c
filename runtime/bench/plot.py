"""A result as a picture: acceptance by position, and where a step's time goes, in one SVG file of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_BLUE, _PARTS = "#2457c5", (("draft_ms", "#3f8cff"), ("verify_ms", "#18a37f"), ("host_ms", "#d98e04"))
_WIDTH, _ROW, _LEFT, _BAR = 640, 24, 120, 420


def plot(document: Mapping[str, Any]) -> str:
    """Both charts for every scenario of a result."""
    parts: list[str] = []
    top = 40
    parts.append(_text(12, 24, f"{document['model_id']}   {document['dflash']['core_digest'][:12]}", bold=True))
    for scenario in document["scenarios"]:
        rates = scenario.get("spec_decode_per_position_acceptance_rates", [])
        parts.append(_text(12, top + 16, f"{scenario['scenario']}: acceptance by position", bold=True))
        top += 26
        top = _bars(parts, top, [(f"position {i + 1}", [(rate, _BLUE)], f"{rate * 100:.0f} %")
                                 for i, rate in enumerate(rates)], 1.0)
        own = scenario["dflash"]
        if own["steps"]:
            parts.append(_text(12, top + 16, f"{scenario['scenario']}: {own['ms_per_step']:.2f} ms a step", bold=True))
            top += 26
            rows = [(name.removesuffix("_ms"), [(own[name], colour)], f"{own[name]:.2f} ms") for name, colour in _PARTS]
            top = _bars(parts, top, rows, own["ms_per_step"])
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top + 12}" '
            f'font-family="system-ui, sans-serif" font-size="13"><rect width="100%" height="100%" fill="#fff"/>'
            f'{"".join(parts)}</svg>\n')


def _bars(parts: list[str], top: int, rows: Sequence[tuple[str, Sequence[tuple[float, str]], str]],
          largest: float) -> int:
    for name, pieces, text in rows:
        parts.append(_text(12, top + 14, name))
        left: float = _LEFT
        parts.append(f'<rect x="{_LEFT}" y="{top + 3}" width="{_BAR}" height="14" rx="3" fill="#e8ebf0"/>')
        for value, colour in pieces:
            width = _BAR * min(1.0, max(0.0, value / largest if largest else 0.0))
            parts.append(f'<rect x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="14" rx="3" fill="{colour}"/>')
            left += width
        parts.append(_text(_LEFT + _BAR + 10, top + 14, text))
        top += _ROW
    return top + 12


def _text(x: int, y: int, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" fill="#1b2330"{weight}>{escape(text)}</text>'
