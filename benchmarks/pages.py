"""Tables in Markdown, targets that are met or missed, and the page that they stand in."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """A bound and what was measured."""

    text: str
    measured: str
    met: bool | None
    """None where it was not measured."""

    @property
    def verdict(self) -> str:
        """In a word."""
        return "not measured" if self.met is None else "met" if self.met else "missed"


def put_between(page: Path, sections: dict[str, str], begin: str, end: str) -> None:
    """Replaces what stands between the marks of each section; marks hold ``{name}`` where its name goes.

    Raises:
        ValueError: The page lacks a mark.
    """
    text = page.read_text()
    for name, content in sections.items():
        first, last = begin.format(name=name), end.format(name=name)
        if text.count(first) != 1 or text.count(last) != 1:
            raise ValueError(f"{page} must have one {first!r} and one {last!r}")
        head, rest = text.split(first)
        text = f"{head}{first}\n\n{content}\n\n{last}{rest.split(last)[1]}"
    page.write_text(text)


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table with one line for each of ``lines``."""
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def target_table(found: Iterable[Target]) -> str:
    """One line for each target."""
    return table(["target", "measured", ""], ([item.text, item.measured, item.verdict] for item in found))


def significant(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
