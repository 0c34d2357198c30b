"""The study on choosing a detector: its rules are those of the library, regrets by definition, and
the page says what was not run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fdbd import Batch, Ensemble, Head
from fdbd.data.pseudo_ood import kinds_of_pixels
from fdbd.decision.choice_rule import BETA, LEAST_SHARE, POOL, make_member, weigh
from fdbd.metrics import auroc
from fdbd.paper import choosing
from fdbd.paper.choice_features import Protocol, StudyScores
from fdbd.paper.choosing import (
    FOURTH,
    LOCKED,
    SECOND,
    THIRD,
    Rule,
    Tables,
    regrets_of,
    regrets_of_single,
    report,
)

CANDIDATES = ("fdbd", "energy", "knn")


def make_scores(title: str = "a network", group: str = "test", seed: int = 0) -> StudyScores:
    """Three candidates, of which the last is the best on both OOD sets."""
    generator = np.random.default_rng(seed)

    def around(*means: float, count: int = 80) -> np.ndarray:
        return np.array([generator.normal(mean, 1, count) for mean in means])

    sets = {"held out": around(0, 0, 0), "test": around(0, 0, 0)}
    for kind in (*choosing.WEIGHING, *choosing.NEAR_KINDS):
        sets[f"kind {kind}"] = around(-0.5, -0.6, -1.0, count=25)
    sets["ood far"] = around(-1, -0.5, -2)
    sets["ood near"] = around(-0.2, -0.3, -1.0)
    deprived = np.full(len(CANDIDATES), np.nan)
    return StudyScores(title, group, ("near",), CANDIDATES, sets, {}, deprived)


def test_p_values_are_those_of_an_ensemble() -> None:
    torch.manual_seed(0)
    head = Head(torch.randn(4, 6))
    fit, held_out, new = (Batch(torch.randn(60, 6).relu()) for _ in range(3))
    ensemble = Ensemble(["energy", "fdbd"], "fisher", weights=[1.0, 3.0]).fit(fit, head)
    ensemble.calibrate(held_out)
    known, scores = (
        torch.stack([member.score(batch) for member in ensemble.members]).double().numpy()
        for batch in (held_out, new)
    )
    log_p = choosing._log_p_values(known, scores)
    np.testing.assert_allclose(np.exp(log_p), ensemble.p_values(new).numpy(), rtol=1e-4)
    combined = np.exp(np.array([0.25, 0.75]) @ log_p)
    np.testing.assert_allclose(combined, ensemble.score(new).numpy(), rtol=1e-4)


def test_the_locked_rule_weighs_as_the_library_does() -> None:
    scores = make_scores()
    tables = Tables.from_scores(scores)
    rule = Rule("small", pool=CANDIDATES)
    aurocs = np.array([tables.kinds[kind] for kind in choosing.WEIGHING])
    np.testing.assert_allclose(rule.weights(scores, tables), weigh(aurocs, rule.beta))
    assert (LOCKED.beta, LOCKED.average, LOCKED.combine) == (0.5, "trimmed", "fisher")
    assert len(LOCKED.pool) == 17


def test_the_library_follows_the_fourth_rule() -> None:
    assert (FOURTH.beta, FOURTH.pool, FOURTH.least) == (BETA, POOL, LEAST_SHARE)
    assert set(SECOND.pool) - set(LOCKED.pool) == {"optfs"}
    assert set(THIRD.pool) - set(SECOND.pool) == {"kpca"}
    assert set(FOURTH.pool) - set(THIRD.pool) == {"react(90)+vim"}
    assert FOURTH.pool in {rule.pool for rule in choosing.LAST}


def test_the_best_fixed_choice_is_one_that_was_scored_on_every_network(monkeypatch) -> None:
    monkeypatch.setattr(choosing, "FIXED", ("fdbd", "energy"))
    networks = [
        make_scores("one", "development", 1),
        # The best on the first could not be fitted here.
        make_scores("two", "test", 2).restricted_to(("fdbd", "energy")),
    ]
    page = report(networks, [], Protocol.read())
    assert "always energy" in page
    assert "always knn" not in page


def test_networks_are_reported_apart_by_what_was_fixed_with_them(monkeypatch) -> None:
    monkeypatch.setattr(choosing, "FIXED", ("fdbd", "energy"))
    networks = [
        make_scores("ResNet-20", "development", 1),
        make_scores("another", "unseen", 2),
        make_scores("a stranger", "fresh", 3),
    ]
    page = report(networks, [], Protocol.read())
    fresh = page.index("### On networks that were scored once, after it had been fixed")
    chosen_by = page.index("### On the networks that it was chosen by")
    end = page.index("## Protocol")
    assert "| a stranger |" in page[fresh:chosen_by]
    assert "| another |" in page[chosen_by:end]
    assert "| ResNet-20 |" in page[chosen_by:end]
    for title in ("a stranger", "another", "ResNet-20"):
        assert page.count(f"| {title} |") == 1


def test_leaving_one_network_out_chooses_the_rule_by_the_others() -> None:
    networks = []
    for seed in range(3):
        scores = make_scores(str(seed), "development", seed)
        networks.append((scores, Tables.from_scores(scores)))
    rules = [Rule("equal", beta=0, pool=CANDIDATES), Rule("by kinds", beta=2, pool=CANDIDATES)]
    regrets = [regrets_of(rule, networks).all_sets for rule in rules]
    expected = []
    for place in range(3):
        others = [each for each in range(3) if each != place]
        of_others = [sum(row[each] for each in others) for row in regrets]
        best = of_others.index(min(of_others))
        expected.append(regrets[best][place])
    np.testing.assert_allclose(choosing.left_out(rules, networks), expected)


def test_the_regret_of_the_best_detector_is_zero_and_of_others_the_difference() -> None:
    scores = make_scores()
    networks = [(scores, Tables.from_scores(scores))]
    assert choosing.best_fixed(networks, set(CANDIDATES)) == "knn"
    np.testing.assert_allclose(regrets_of_single("knn", networks).all_sets, 0)
    inside = scores.sets["test"]
    gap = np.mean(
        [
            auroc(inside[2], scores.sets[name][2]) - auroc(inside[1], scores.sets[name][1])
            for name in ("ood far", "ood near")
        ]
    )
    np.testing.assert_allclose(regrets_of_single("energy", networks).all_sets, 100 * gap)
    near = regrets_of(Rule("one", pool=("knn",)), networks).near
    # Only ties between p-values part a pool of one from the detector itself.
    np.testing.assert_allclose(near, 0, atol=1.0)


def test_the_page_says_first_how_well_it_does_and_last_what_was_tried_and_not_run(
    monkeypatch,
) -> None:
    monkeypatch.setattr(choosing, "FIXED", ("fdbd", "energy"))
    networks = [
        make_scores("one", "development", 1),
        make_scores("two", "development", 2),
        make_scores("three", "unseen", 3),
    ]
    page = report(networks, ["four: no weights"], Protocol.read())
    order = [
        "## What the library does",
        "## How well it does",
        "## Protocol",
        "## What this does not show",
        "## How the rule came about",
        "## Rules that were tried",
        "## How this page was made",
    ]
    places = [page.index(title) for title in order]
    assert places == sorted(places)
    assert f"{len(choosing.TRIED) + 1} rules were tried" in page
    assert "- four: no weights" in page
    assert "**experimental**" in page
    # Means over the development networks, and over the unseen one.
    assert "| development (2) | unseen (1) |" in page


def test_the_protocol_names_candidates_that_exist_and_no_network_twice() -> None:
    protocol = Protocol.read()
    assert set(POOL) <= set(protocol.candidates)
    for name in protocol.candidates:
        make_member(name)
    titles = [entry.title for entry in protocol.networks]
    assert len(set(titles)) == len(titles)
    for entry in protocol.networks:
        assert entry.group in choosing.GROUPS
        assert set(protocol.near.get(entry.id, ())) <= set(protocol.ood[entry.id])


def test_kinds_of_pixels_are_bytes_of_the_same_size() -> None:
    squares = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    made = kinds_of_pixels(squares, ["patches", "blur"], 7)
    assert {name: (kind.shape, kind.dtype) for name, kind in made.items()} == {
        "patches": ((7, 16, 16, 3), np.uint8),
        "blur": ((7, 16, 16, 3), np.uint8),
    }


def test_a_command_without_any_network_says_why(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FDBD_CACHE", str(tmp_path))
    monkeypatch.delenv("FDBD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="fdbd train mnist-cnn"):
        choosing.main(["--networks", "small CNN on MNIST", "--device", "cpu"])


def test_a_network_with_kinds_of_its_own_is_weighed_by_these() -> None:
    scores = make_scores()
    sets = {name: values for name, values in scores.sets.items() if not name.startswith("kind ")}
    sets["kind shuffled words"] = scores.sets["kind patches"]
    of_texts = replace(scores, sets=sets)
    tables = Tables.from_scores(of_texts)
    rule = Rule("small", pool=CANDIDATES)
    expected = weigh(tables.kinds["shuffled words"][None], rule.beta)
    np.testing.assert_allclose(rule.weights(of_texts, tables), expected)
