"""Pictures of episodes: frames in a strip, or the conversation as a page of text."""

import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from freshper_lightning.envs.frames import Color
from freshper_lightning.inspection.playback import Moment, has_frames, play_again
from freshper_lightning.inspection.text import WIDTH, Block, Kind, conversation, number
from freshper_lightning.inspection.wrapping import visible
from freshper_lightning.rollout.collector import EnvironmentConfig
from freshper_lightning.rollout.conversation import ChatFormat
from freshper_lightning.trajectory import Trajectory

PAPER, INK, FADED, STRESSED = (255, 255, 255), (32, 32, 32), (110, 110, 110), (20, 70, 170)
LONGER_SIDE = 160
"""Frames are enlarged by a whole number, the first that makes their longer side at least so many pixels."""
WIDEST = 1260
"""Most pixels of a row of frames, unless one alone is wider."""
MARGIN, SIZE, LINE = 12, 14, 19
"""Pixels: around and between, of the type, from line to line."""

COLORS: dict[Kind, Color] = {"facts": INK, "heading": FADED, "prompt": INK, "reply": STRESSED}


@cache
def _font() -> ImageFont.FreeTypeFont:
    """The monospaced one that comes with matplotlib."""
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono.ttf", SIZE)


def _character_width() -> int:
    return math.ceil(_font().getlength("m"))


def draw(trajectory: Trajectory, chat: ChatFormat, environment: EnvironmentConfig) -> Image.Image:
    """The frames of an episode where its environment renders them, or else its conversation.

    Raises:
        ValueError: The environment cannot be made.
        ConfigurationError: It has frames, and the episode cannot be played again.
    """
    if has_frames(environment):
        return strip(play_again(trajectory, chat, environment))
    return page(conversation(trajectory, chat.tokenizer))


def strip(moments: Sequence[Moment], widest: int = WIDEST) -> Image.Image:
    """Every frame in turn, side by side in rows of at most ``widest`` pixels, with turn, reward and reply below."""
    frames = [_enlarged(moment) for moment in moments]
    width, height = max(f.width for f in frames) + MARGIN, max(f.height for f in frames) + 3 * LINE + MARGIN
    columns = min(max((widest - MARGIN) // width, 1), len(frames))
    rows = -(-len(frames) // columns)
    picture = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), PAPER)
    pen = ImageDraw.Draw(picture)
    for turn, (moment, frame) in enumerate(zip(moments, frames, strict=True)):
        left, top = MARGIN + turn % columns * width, MARGIN + turn // columns * height
        picture.paste(frame, (left, top))
        room = (width - MARGIN) // _character_width()
        for line, (text, color) in enumerate(_caption(turn, moment)):
            place = left, top + frame.height + 4 + line * LINE
            pen.text(place, _clipped(text, room), fill=color, font=_font())
    return picture


def _enlarged(moment: Moment) -> Image.Image:
    frame = Image.fromarray(moment.frame)
    factor = -(-LONGER_SIDE // max(frame.size))
    return frame.resize((factor * frame.width, factor * frame.height), Image.Resampling.NEAREST)


def _caption(turn: int, moment: Moment) -> list[tuple[str, Color]]:
    if moment.step is None:
        return [("start", INK)]
    invalid = "" if moment.step.valid else ", invalid"
    return [
        (f"turn {turn}{invalid}", INK),
        (f"reward {number(moment.step.reward)}", INK),
        (moment.reply.strip(), STRESSED),
    ]


def _clipped(text: str, room: int) -> str:
    text = visible(text.replace("\n", " "))
    return text if len(text) <= room else text[: room - 1] + "…"


def page(shown: Iterable[Block], width: int = WIDTH) -> Image.Image:
    """The text of ``shown`` in lines of at most ``width`` characters; replies stand out."""
    lines = [(line, COLORS[block.kind]) for block in shown for line in block.lines(width)]
    longest = max((_font().getlength(line) for line, _ in lines), default=0)
    size = math.ceil(longest) + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    picture = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(picture)
    for row, (line, color) in enumerate(lines):
        pen.text((MARGIN, MARGIN + row * LINE), line, fill=color, font=_font())
    return picture
