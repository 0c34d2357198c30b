"""What storing the package's ResNet-50 features as 8-bit codes costs: AUROC of every detector on
every OOD set, from the codes and from the float32 features from which `tools/make_bundle.py` makes
them.

    FDBD_DATA=FOLDER python benchmarks/bundle_codes.py

Writes its section of RESULTS.md.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from _common import machine, table, write_section

from fdbd.bench import Benchmark, Config, FeatureSet, benchmark_of, load_bundle
from fdbd.bench.bundle import DEFAULT, FOLDER, NEAR_SCENES, bundle_model
from fdbd.data.datasets import load


def in_floats() -> Benchmark:
    """The bundle's samples as float32 features of the same network, from the cache or computed
    now."""
    config = Config.from_dict(
        {"model": bundle_model(DEFAULT), "id": "imagenet-sample", "ood": ["textures", "sun"]}
    )
    whole = benchmark_of(config)
    textures, sun = whole.ood
    paths = load("sun", "test", for_size=224).paths
    assert paths is not None
    is_near = torch.tensor([path.name.startswith(NEAR_SCENES) for path in paths])
    far_scenes = FeatureSet("sun", sun.features[~is_near])
    near_scenes = FeatureSet("sun-near", sun.features[is_near])
    return replace(whole, ood=[textures, far_scenes, near_scenes])


def main() -> None:
    coded = load_bundle().run(latency=False, progress=False)
    floats = in_floats().run(latency=False, progress=False)
    rows = []
    for row in coded.finished:
        other = floats.row(row.name).evaluations
        gaps = {}
        for name, found in row.evaluations.items():
            gaps[name] = 100 * (float(found.auroc) - float(other[name].auroc))
        worst = max(gaps, key=lambda name: abs(gaps[name]))
        rows.append([row.name, *(f"{gap:+.3f}" for gap in gaps.values()), worst, abs(gaps[worst])])
    rows.sort(key=lambda cells: -cells[-1])
    within = sum(cells[-1] <= 0.05 for cells in rows)
    sizes = {
        path.name: path.stat().st_size / 1e6
        for path in sorted(FOLDER.glob(f"{DEFAULT}-*.safetensors"))
    }
    lines = [
        (
            f"AUROC from 8-bit codes minus AUROC from float32 features, in points: {within} of"
            f" {len(rows)} detectors are within 0.05 on every set; the largest difference is"
            f" {rows[0][-1]:.3f} ({rows[0][0]} on {rows[0][-2]})."
        ),
        "",
        f"Files: {', '.join(f'{name} {size:.1f} MB' for name, size in sizes.items())}.",
        "",
        table(
            ["detector", *(samples.name for samples in load_bundle().ood)],
            [cells[:-2] for cells in rows],
        ),
        f"`python benchmarks/bundle_codes.py` on {machine()}.",
    ]
    write_section("8-bit features in the package", "\n".join(lines))


if __name__ == "__main__":
    main()
