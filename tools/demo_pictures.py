"""Make the pictures that `fdbd demo` offers: four are drawn here, four are public-domain photographs.

    python tools/demo_pictures.py FOLDER

FOLDER is `skimage/data` of an installed or unpacked scikit-image. NOTICE says whose the photographs
are. The pictures are written to src/fdbd/serve/assets/examples, together with the list that the page
shows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

OUT = Path(__file__).parent.parent / "src/fdbd/serve/assets/examples"
DRAWN = 768
"""Pixels of a side, as a picture is drawn; it is reduced afterwards, which smooths its edges."""
SIDE = 192
"""Pixels of a side, as a picture is stored."""
PHOTOGRAPHS = {
    "cat": "chelsea.png",
    "galaxies": "hubble_deep_field.jpg",
    "bricks": "brick.png",
    "rocket": "rocket.jpg",
}
TITLES = {
    "cat": "Cat",
    "ship": "Ship",
    "airplane": "Plane",
    "car": "Car",
    "galaxies": "Galaxies",
    "bricks": "Bricks",
    "chart": "Chart",
    "rocket": "Rocket",
}
"""In the order of the page. The network knows the first four; it takes the rocket for a ship, and
the guard accepts that: not every OOD image is found."""

Colour = tuple[int, int, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="skimage/data of a scikit-image")
    folder = parser.parse_args().folder
    pictures = {"ship": ship(), "airplane": airplane(), "car": car(), "chart": chart()}
    for name, file in PHOTOGRAPHS.items():
        pictures[name] = Image.open(folder / file).convert("RGB")
    OUT.mkdir(exist_ok=True)
    for name, picture in pictures.items():
        square(picture).save(OUT / f"{name}.jpg", quality=82)
    listed = [{"file": f"{name}.jpg", "title": title} for name, title in TITLES.items()]
    (OUT / "examples.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


def square(picture: Image.Image) -> Image.Image:
    """The middle of a picture, at the size that is stored."""
    width, height = picture.size
    side = min(width, height)
    left = (width - side) // 2
    top = (height - side) // 2
    middle = picture.crop((left, top, left + side, top + side))
    return middle.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def gradient(top: Colour, bottom: Colour) -> Image.Image:
    """A background that changes from one colour to another, with a little grain."""
    share = np.linspace(0, 1, DRAWN)[:, None, None]
    pixels = np.array(top) * (1 - share) + np.array(bottom) * share
    grain = np.random.default_rng(0).normal(0, 4, (DRAWN, DRAWN, 1))
    return Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8))


def ship() -> Image.Image:
    picture = gradient((170, 200, 225), (215, 225, 230))
    sea = gradient((60, 100, 130), (25, 55, 85)).crop((0, 0, DRAWN, 320))
    picture.paste(sea, (0, 448))
    draw = ImageDraw.Draw(picture)
    draw.polygon([(110, 400), (660, 400), (610, 500), (170, 500)], fill=(120, 30, 28))
    draw.polygon([(105, 375), (672, 375), (660, 405), (112, 405)], fill=(28, 30, 36))
    draw.rectangle((200, 300, 520, 376), fill=(238, 238, 232))
    draw.rectangle((250, 245, 440, 302), fill=(225, 225, 220))
    for x in range(215, 510, 32):
        draw.rectangle((x, 325, x + 16, 345), fill=(50, 70, 90))
    draw.rectangle((300, 170, 350, 246), fill=(190, 60, 40))
    draw.rectangle((300, 170, 350, 190), fill=(20, 20, 20))
    draw.line((560, 375, 560, 180), fill=(60, 60, 60), width=7)
    return picture.filter(ImageFilter.GaussianBlur(3))


def airplane() -> Image.Image:
    picture = gradient((70, 130, 205), (190, 215, 240))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((90, 340, 690, 430), fill=(235, 238, 242))
    draw.ellipse((100, 385, 680, 432), fill=(170, 178, 188))
    draw.polygon([(120, 370), (70, 240), (140, 240), (230, 350)], fill=(30, 60, 140))
    draw.polygon([(330, 395), (250, 560), (330, 560), (480, 400)], fill=(150, 158, 170))
    draw.polygon([(380, 345), (350, 250), (400, 250), (480, 350)], fill=(200, 205, 212))
    for x in range(230, 600, 30):
        draw.ellipse((x, 368, x + 12, 380), fill=(40, 50, 70))
    draw.ellipse((350, 440, 430, 475), fill=(90, 95, 105))
    return picture.filter(ImageFilter.GaussianBlur(3))


def car() -> Image.Image:
    picture = gradient((185, 205, 220), (225, 225, 220))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 480, DRAWN, DRAWN), fill=(105, 105, 108))
    draw.rectangle((0, 440, DRAWN, 482), fill=(90, 120, 70))
    roof = [(200, 370), (290, 270), (510, 270), (600, 370)]
    draw.polygon([(80, 500), (90, 400), *roof, (690, 400), (700, 500)], fill=(185, 25, 30))
    draw.polygon([(230, 370), (305, 290), (395, 290), (395, 370)], fill=(40, 55, 70))
    draw.polygon([(410, 370), (410, 290), (500, 290), (565, 370)], fill=(40, 55, 70))
    for x in (210, 570):
        draw.ellipse((x - 68, 440, x + 68, 576), fill=(20, 20, 22))
        draw.ellipse((x - 34, 474, x + 34, 542), fill=(170, 170, 175))
    draw.ellipse((655, 410, 695, 445), fill=(250, 240, 190))
    draw.rectangle((80, 420, 100, 450), fill=(250, 90, 60))
    draw.ellipse((60, 560, 720, 600), fill=(70, 70, 72))
    return picture.filter(ImageFilter.GaussianBlur(3))


def chart() -> Image.Image:
    picture = Image.new("RGB", (DRAWN, DRAWN), (252, 252, 250))
    draw = ImageDraw.Draw(picture)
    for y in range(130, 640, 85):
        draw.line((110, y, 690, y), fill=(205, 208, 212), width=4)
    for number, height in enumerate((150, 240, 205, 330, 290, 430)):
        left = 140 + 92 * number
        draw.rectangle((left, 640 - height, left + 60, 640), fill=(32, 87, 168))
    draw.line((110, 90, 110, 642), fill=(40, 44, 50), width=8)
    draw.line((106, 640, 700, 640), fill=(40, 44, 50), width=8)
    return picture


if __name__ == "__main__":
    main()
