"""A figure in words, for whoever cannot see it: first what it shows, then where its lines run."""

from __future__ import annotations

from fedflat.report.figures import Figure, Series

NAMED = 6  # series that are described one by one


def describe(figure: Figure) -> str:
    """The finding, then each of the first series, then the lines drawn across."""
    shown = [series for series in figure.series if series.y]
    sentences = [finding(figure, shown)] if len(shown) > 1 else []
    sentences += [_course(figure, series, alone=len(shown) == 1) for series in shown[:NAMED]]
    if len(shown) > NAMED:
        sentences.append(f"And {len(shown) - NAMED} more in the data table.")
    sentences += [f"{label[:1].upper()}{label[1:]}: drawn at {value_text(figure, at)}." for label, at in figure.lines]
    return " ".join(sentences)


def finding(figure: Figure, shown: list[Series]) -> str:
    """How the series rank: at their ends, or over all bars."""
    bars = figure.kind == "bars"
    measured = [(sum(series.y) / len(series.y) if bars else series.y[-1], series.label) for series in shown]
    ranked = sorted(measured, key=lambda each: -each[0])
    listed = ", ".join(f"{label} {value_text(figure, value)}" for value, label in ranked)
    return f"{'Mean over all' if bars else 'In the end'}, highest first: {listed}."


def _course(figure: Figure, series: Series, alone: bool) -> str:
    """One series: where it starts, ends and turns; of bars the extremes."""
    turns, values = series.x["round"], series.y
    top, bottom = (pick(range(len(values)), key=values.__getitem__) for pick in (max, min))
    high = f"highest {value_text(figure, values[top])} at {figure.x_title} {turns[top]:g}"
    if figure.kind == "bars":
        return f"{series.label}: {high}, lowest {value_text(figure, values[bottom])} at {turns[bottom]:g}."
    first, last = (f"{value_text(figure, values[at])} at {figure.x_title} {turns[at]:g}" for at in (0, -1))
    way = _way(values)
    low = f"lowest {value_text(figure, values[bottom])} at {figure.x_title} {turns[bottom]:g}"
    turned = [text for text, place in ((high, top), (low, bottom)) if 0 < place < len(values) - 1]
    return (
        f"{'' if alone else f'{series.label}: '}{way} from {first} to {last}{''.join(f', {text}' for text in turned)}."
    )


def _way(values: tuple[float, ...]) -> str:
    """How a line ends against its start; as it was where the difference is small beside how far it ranges."""
    gap, span = values[-1] - values[0], max(values) - min(values)
    return "about level" if abs(gap) <= 0.1 * span else "up" if gap > 0 else "down"


def value_text(figure: Figure, value: float) -> str:
    """A value as this figure's readers know it."""
    return f"{100 * value:.2f} %" if figure.percent else f"{value:.4g}"
