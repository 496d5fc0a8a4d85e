"""Small charts as SVG text: lines with error bars, and grouped bars. No scripts, no fonts to fetch, readable in print.

Series differ by colour and by dash or hatch, so that a grey print can still be read (colours: Okabe & Ito 2008).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "1 4", "12 4")
WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 44
GAP, NAME_AT, NAME_DEPTH, DIGIT, POINT = 6, 14, 8, 8.4, 4.4
"""Tick label to axis, base line of the y axis's name and what it takes to the right of it (letters that hang down, and
air), and the widths of a digit and a point in the widest of the page's fonts."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one line; `faint` draws it thin behind the others. `bars` are (x, low, high) error bars.

    `dash` is a number of DASHES; None takes the colour's.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    faint: bool = False
    dash: int | None = None
    bars: Sequence[tuple[float, float, float]] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Ranges of both axes and where they lie on the picture."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float
    left: float = LEFT

    def x(self, value: float) -> float:
        """Picture x of a value."""
        return self.left + (value - self.low_x) / (self.high_x - self.low_x) * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        """Picture y of a value."""
        return HEIGHT - BOTTOM - (value - self.low_y) / (self.high_y - self.low_y) * (HEIGHT - TOP - BOTTOM)


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """About `count` round values that cover low to high; `whole` keeps them to whole numbers."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def label(value: float) -> str:
    """A tick's text: short, without float noise."""
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.10g}" if abs(value) >= 1 else f"{value:.4g}"


def margin(y_ticks: Sequence[float]) -> float:
    """Where the plot begins, so that the name of the y axis stands to the left of its widest tick label."""
    widest = max(sum(POINT if letter == "." else DIGIT for letter in label(value)) for value in y_ticks)
    return max(float(LEFT), NAME_AT + NAME_DEPTH + widest + GAP)


def lines(series: Sequence[Series], x_label: str, y_label: str, level: float | None = None) -> str:
    """A line chart; `level` draws a thin reference line across. "" when there is nothing to draw."""
    drawn = [found for found in series if found.points]
    if not drawn:
        return ""
    xs = [x for found in drawn for x, _ in found.points]
    # A faint line may leave the picture: single turns scatter more than the figure they are averaged to.
    ys = [y for found in drawn if not found.faint for _, y in found.points]
    ys += [end for found in drawn for _, *ends in found.bars for end in ends] + ([] if level is None else [level])
    y_ticks, x_ticks = ticks(min(ys), max(ys)), ticks(min(xs), max(xs), 6, whole=True)
    high_x = max(max(xs), min(xs) + 1)
    frame = Frame(low_x=min(xs), high_x=high_x, low_y=y_ticks[0], high_y=y_ticks[-1], left=margin(y_ticks))
    parts = _axes(frame, [x for x in x_ticks if frame.low_x <= x <= frame.high_x], y_ticks, x_label, y_label)
    if level is not None:
        y = frame.y(level)
        parts.append(f'<line class="level" x1="{frame.left:.1f}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    parts += [_line(found, frame) for found in sorted(drawn, key=lambda found: not found.faint)]
    keys = [(found.name, found.colour, _dash(found)) for found in drawn if not found.faint]
    return _picture(parts, f"{y_label} by {x_label}") + legend(keys)


def _dash(found: Series) -> str:
    return DASHES[(found.colour if found.dash is None else found.dash) % len(DASHES)]


def _line(found: Series, frame: Frame) -> str:
    colour, dash = COLOURS[found.colour % len(COLOURS)], _dash(found)
    path = "M" + "L".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in found.points)
    faint = f'stroke-width="1" opacity="{0.25 if len(found.points) <= 60 else 0.1}"'
    style = faint if found.faint else f'stroke-width="2.2" stroke-dasharray="{dash}"'
    text = f'<path d="{path}" fill="none" stroke="{colour}" {style} clip-path="url(#{_clip(frame.left)})"/>'
    if len(found.points) <= 40 and not found.faint:
        places = [f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"' for x, y in found.points]
        text += "".join(f'<circle {place} r="2.6" fill="{colour}"/>' for place in places)
    shift = (found.colour - 1) * 2.5
    for x, low, high in found.bars:
        at, top, bottom = min(max(frame.x(x) + shift, frame.left + 2), WIDTH - RIGHT - 2), frame.y(high), frame.y(low)
        text += (
            f'<path d="M{at:.1f},{top:.1f}V{bottom:.1f}M{at - 4:.1f},{top:.1f}h8M{at - 4:.1f},{bottom:.1f}h8" '
            f'stroke="{colour}" stroke-width="1.6" fill="none"/>'
        )
    return text


def bars(
    groups: Sequence[str],
    series: Sequence[tuple[str, int, Sequence[float | None]]],
    y_label: str,
    hollow: Collection[str] = (),
) -> str:
    """Grouped bars: for each group one bar a series (name, colour, values). "" when there is nothing to draw.

    hollow: names of series drawn as outlines.
    """
    series = [found for found in series if any(value is not None for value in found[2])]
    values = [value for _, _, found in series for value in found if value is not None]
    if not values or not groups:
        return ""
    y_ticks = ticks(0.0, max(values) or 1.0)
    frame = Frame(low_x=0, high_x=len(groups), low_y=0, high_y=y_ticks[-1], left=margin(y_ticks))
    parts = _axes(frame, [], y_ticks, "", y_label)
    width = (frame.x(1) - frame.x(0)) * 0.8 / len(series)
    for place, group in enumerate(groups):
        for number, (name, colour, found) in enumerate(series):
            value = found[place]
            if value is not None:
                # A divergence of nothing but float noise may be below 0.
                x, y = frame.x(place + 0.1) + number * width, frame.y(max(value, 0.0))
                parts.append(
                    f'<rect x="{x + 0.6:.1f}" y="{y:.1f}" width="{width * 0.92 - 1.2:.1f}" '
                    f'height="{frame.y(0) - y:.1f}" {_paint(colour, name in hollow)}>'
                    f"<title>{escape(group)}, {escape(name)}: {label(value)}</title></rect>"
                )
        parts.append(_text(frame.x(place + 0.5), HEIGHT - BOTTOM + 16, group, "middle", narrow=len(groups) > 4))
    return _picture(parts, y_label) + legend([(name, colour, "") for name, colour, _ in series], hollow)


def _paint(colour: int, hollow: bool) -> str:
    paint = COLOURS[colour % len(COLOURS)]
    return f'fill="{"#fff" if hollow else paint}" stroke="{paint}" stroke-width="1.2"'


def _clip(left: float) -> str:
    """Name of the plot's area. All charts of a page share their names, so the area decides it."""
    return f"plot-{left:.1f}".replace(".", "-")


def _axes(frame: Frame, x_ticks: list[float], y_ticks: list[float], x_label: str, y_label: str) -> list[str]:
    left = frame.left
    plot = f'x="{left:.1f}" y="{TOP}" width="{WIDTH - left - RIGHT:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
    parts = [f'<defs><clipPath id="{_clip(left)}"><rect {plot}/></clipPath></defs>']
    for value in y_ticks:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{frame.left:.1f}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(left - GAP, y + 4, label(value), "end"))
    for value in x_ticks:
        parts.append(
            f'<line class="axis" x1="{frame.x(value):.1f}" x2="{frame.x(value):.1f}" y1="{HEIGHT - BOTTOM}" '
            f'y2="{HEIGHT - BOTTOM + 4}"/>'
        )
        parts.append(_text(frame.x(value), HEIGHT - BOTTOM + 17, label(value), "middle"))
    parts.append(f'<path class="axis" d="M{left:.1f},{TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none"/>')
    parts.append(_text((left + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle"))
    place = f'transform="translate({NAME_AT},{(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text class="name" {place}>{escape(y_label)}</text>')
    return parts


def _text(x: float, y: float, text: str, anchor: str, narrow: bool = False) -> str:
    kind = ' class="narrow"' if narrow else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _picture(parts: list[str], title: str) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">{inside}</svg>'


def legend(keys: Sequence[tuple[str, int, str]], hollow: Collection[str] = ()) -> str:
    """Names beside short strokes in their colour and dash ("": a block, an outline for `hollow` ones); wraps on narrow
    screens."""
    items = []
    for name, colour, dash in {key[0]: key for key in keys}.values():
        if dash:
            paint = f'stroke="{COLOURS[colour % len(COLOURS)]}" stroke-width="4" stroke-dasharray="{dash}"'
            drawn = f'<line x1="0" x2="28" y1="4" y2="4" {paint}/>'
        else:
            drawn = f'<rect x="1" y="2" width="26" height="4" {_paint(colour, name in hollow)}/>'
        items.append(f'<span><svg class="key" viewBox="0 0 28 8">{drawn}</svg>{escape(name)}</span>')
    return f'<p class="legend">{"".join(items)}</p>'
