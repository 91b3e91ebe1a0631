"""A line plot as a PNG, with nothing but zlib: benchmarks must not need a plotting library."""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WIDTH, HEIGHT = 960, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
SCALE = 2
COLORS = ((31, 119, 180), (214, 39, 40), (127, 127, 127), (44, 160, 44))
BLACK, GRID = (40, 40, 40), (225, 225, 225)
# 3 x 5 points each, a row of them after the other
FONT = {
    " ": "000000000000000", "0": "111101101101111", "1": "010110010010111", "2": "111001111100111",
    "3": "111001111001111", "4": "101101111001001", "5": "111100111001111", "6": "111100111101111",
    "7": "111001010010010", "8": "111101111101111", "9": "111101111001111", ".": "000000000000010",
    ",": "000000000010100", "-": "000000111000000", "+": "000010111010000", ":": "000010000010000",
    "/": "001001010100100", "%": "101001010100101", "(": "010100100100010", ")": "010001001001010",
    "A": "010101111101101", "B": "110101110101110", "C": "011100100100011", "D": "110101101101110",
    "E": "111100110100111", "F": "111100110100100", "G": "011100101101011", "H": "101101111101101",
    "I": "111010010010111", "J": "001001001101010", "K": "101101110101101", "L": "100100100100111",
    "M": "101111111101101", "N": "110101101101101", "O": "010101101101010", "P": "110101110100100",
    "Q": "010101101111011", "R": "110101110101101", "S": "011100010001110", "T": "111010010010010",
    "U": "101101101101111", "V": "101101101101010", "W": "101101111111101", "X": "101101010101101",
    "Y": "101101010010010", "Z": "111001010100111",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]


class Canvas:
    def __init__(self, width: int = WIDTH, height: int = HEIGHT) -> None:
        self.pixels = np.full((height, width, 3), 255, np.uint8)

    def dot(self, x: float, y: float, color: tuple[int, int, int], size: int = 1) -> None:
        column, row = round(x), round(y)
        if 0 <= column < self.pixels.shape[1] and 0 <= row < self.pixels.shape[0]:
            self.pixels[row : row + size, column : column + size] = color

    def line(
        self, start: tuple[float, float], end: tuple[float, float], color: tuple[int, int, int], size: int
    ) -> None:
        steps = max(1, math.ceil(max(abs(end[0] - start[0]), abs(end[1] - start[1]))))
        for x, y in zip(
            np.linspace(start[0], end[0], steps + 1), np.linspace(start[1], end[1], steps + 1), strict=True
        ):
            self.dot(x, y, color, size)

    def text(self, x: int, y: int, text: str, color: tuple[int, int, int] = BLACK) -> None:
        for letter in text.upper():
            for at, bit in enumerate(FONT.get(letter, FONT[" "])):
                if bit == "1":
                    self.dot(x + at % 3 * SCALE, y + at // 3 * SCALE, color, SCALE)
            x += 4 * SCALE

    def png(self) -> bytes:
        height, width, _ = self.pixels.shape
        raw = b"".join(b"\0" + row.tobytes() for row in self.pixels)
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")]
        parts = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
                 for kind, data in chunks]  # fmt: skip
        return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers between the two."""
    span = max(high - low, 1e-9)
    step = 10 ** math.floor(math.log10(span / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if span / (step * factor) <= most)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def draw(
    path: Path, title: str, x_name: str, y_name: str, lines: Sequence[Line], marks: Sequence[tuple[float, str]] = ()
) -> None:
    """Lines over a linear x and a logarithmic y; marks are named places on x."""
    canvas = Canvas()
    xs = [x for line in lines for x in line.x] or [0.0, 1.0]
    ys = [y for line in lines for y in line.y if y > 0] or [0.1, 1.0]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1e-9)
    y_low, y_high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    y_high = max(y_high, y_low + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log10(max(y, 10.0**y_low)) - y_low) / (y_high - y_low)
        return (LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT),
                HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM))  # fmt: skip

    for power in range(y_low, y_high + 1):
        left, right = place(x_low, 10.0**power), place(x_high, 10.0**power)
        canvas.line(left, right, GRID, 1)
        canvas.text(8, round(left[1]) - 5, f"{10.0**power:g}")
    for value in ticks(x_low, x_high):
        bottom = place(value, 10.0**y_low)
        canvas.line(bottom, place(value, 10.0**y_high), GRID, 1)
        canvas.text(round(bottom[0]) - 8, HEIGHT - BOTTOM + 8, f"{value:g}")
    for number, (value, name) in enumerate(marks):
        bottom, top = place(value, 10.0**y_low), place(value, 10.0**y_high)
        canvas.line(bottom, top, BLACK, 1)
        canvas.text(round(bottom[0]) + 4, HEIGHT - BOTTOM - 14 * (1 + number % 4), name)
    for line, color in zip(lines, COLORS, strict=False):
        points = [place(x, y) for x, y in zip(line.x, line.y, strict=True)]
        for start, end in itertools.pairwise(points):
            canvas.line(start, end, color, 2)
    canvas.text(LEFT, 10, title)
    canvas.text(LEFT, HEIGHT - 20, x_name)
    canvas.text(8, 24, y_name)
    at = WIDTH // 2
    for line, color in zip(lines, COLORS, strict=False):
        canvas.text(at, 24, line.name, color)
        at += (len(line.name) + 2) * 4 * SCALE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(canvas.png())
