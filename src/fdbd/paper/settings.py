"""The schemas of experiment files: one for each kind of experiment, and one for the models that
they name. A misspelt key is an error, see `fdbd.core.tables`."""

from dataclasses import dataclass, field
from typing import Any

DetectorSpec = str | dict[str, Any]
"""A detector as `fdbd bench` takes it: a name, or a table with `name`, options and perhaps a
`title`."""


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A network and the data that it is evaluated on. With `bundle` the features come from the
    package; otherwise `model`, `id` and `ood` say what `fdbd bench` would run."""

    title: str
    bundle: str = ""
    model: str = ""
    id: str = ""
    ood: tuple[str, ...] | dict[str, str] = ()
    train: str | None = None
    checkpoint: str | None = None
    num_classes: int | None = None
    preprocess: str | dict[str, Any] | None = None
    limit: int | None = None
    train_limit: int | None = None
    batch_size: int | None = None
    #: the command that makes `checkpoint`
    train_with: str = ""
    #: names of the layers that MDS reads beside the penultimate features
    layers: tuple[str, ...] = ()
    #: detectors of this model alone, in place of those of the experiment
    detectors: tuple[DetectorSpec, ...] = ()
    #: detectors that need images: "odin", "csi" and "mds, layers and noise"
    images: tuple[str, ...] = ()
    #: what of the paper this model stands in for, as one sentence for the reader
    stand_in: str = ""
    #: percent of the paper's own network, to be compared with the accuracy here
    paper_accuracy: float | None = None
    #: every how many ranks `figure-distances` draws a histogram
    every: int | None = None


@dataclass(frozen=True, kw_only=True)
class NotTested:
    """A statement of the paper that nothing here can decide, and why."""

    statement: str
    why: str


@dataclass(frozen=True, kw_only=True)
class NotComparable:
    """Detectors whose rows on some models say nothing about the paper's, and why. Statements that
    compare with them are "not tested"; the rows stay in the table."""

    models: tuple[str, ...]
    detectors: tuple[str, ...]
    why: str


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The paper's number for how far the FPR95 of one detector lies below that of another, in
    percent of the latter."""

    first: str
    second: str
    paper: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Entries that every kind of experiment may have."""

    not_tested: tuple[NotTested, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """An experiment on models; `untested` says why it cannot be run at a scale at all."""

    models: tuple[ModelEntry, ...] = ()
    untested: str = ""


@dataclass(frozen=True, kw_only=True)
class DetectorTable(ModelSettings):
    """Pairs in `better`, `better_on_every_set` and `level` are (detector, other detector)."""

    detectors: tuple[DetectorSpec, ...] = ()
    better: tuple[tuple[str, str], ...] = ()
    better_on_every_set: tuple[tuple[str, str], ...] = ()
    level: tuple[tuple[str, str], ...] = ()
    #: (model, detector, other model, its detector): the first pair is said to separate better
    across_models: tuple[tuple[str, str, str, str], ...] = ()
    #: detectors that are said to hardly separate
    near_chance: tuple[str, ...] = ()
    #: share of the forward pass that fDBD may add
    cost_below: float | None = None
    cuts: tuple[Cut, ...] = ()
    not_comparable: tuple[NotComparable, ...] = ()
    #: images per set, and for the fit, of the detectors that need images
    image_limit: int = 1000
    image_fit_limit: int | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One option of a detector at several values; `paper` is the value that its paper gives."""

    detector: str
    option: str
    values: tuple[float, ...]
    paper: float


@dataclass(frozen=True, kw_only=True)
class Percentiles(ModelSettings):
    """`shapings` has the paper's percentile for each shaping."""

    percentiles: tuple[float, ...]
    shapings: dict[str, float]
    sweeps: tuple[Sweep, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DomainShift(ModelSettings):
    """`slight` is the fall in points of AUROC that still counts as slight."""

    severities: tuple[int, ...]
    limit: int
    slight: float


@dataclass(frozen=True, kw_only=True)
class Deviation(ModelSettings):
    levels: int


@dataclass(frozen=True, kw_only=True)
class Distances(ModelSettings):
    every: int


@dataclass(frozen=True, kw_only=True)
class NearestK(ModelSettings):
    """`ks` are numbers of nearest boundaries; without any, all numbers are tried."""

    ks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Settings of the attack of Carlini and Wagner."""

    initial_constant: float
    rate: float
    steps: int
    searches: int


@dataclass(frozen=True, kw_only=True)
class DistanceQuality(ModelSettings):
    """`claimed` is the paper's largest relative gap; `attacked` pairs are attacked in one batch,
    `one_by_one` of them also alone."""

    samples: int
    claimed: float
    attack: Attack
    attacked: int
    one_by_one: int


@dataclass(frozen=True, kw_only=True)
class Theorem(Settings):
    """`sizes` are pairs (classes, dimensions)."""

    seed: int
    sizes: tuple[tuple[int, int], ...]
    samples: int
    tries: int


@dataclass(frozen=True, kw_only=True)
class PropositionOne(Settings):
    """`broken` is the size at which a bias on one class breaks the assumption."""

    seed: int
    sizes: tuple[tuple[int, int], ...]
    radii: tuple[float, ...]
    broken: tuple[int, int]
    biases: tuple[float, ...]
    points: int


@dataclass(frozen=True, kw_only=True)
class PropositionTwo(Settings):
    """`separated` and `overlapping` are 2σ in units of the largest one that keeps classes apart;
    `places` put the radius between −1 and 1 of the dense region's reach. `twins` are (pairs,
    dimensions, half angle, share of the distance to the boundary)."""

    seed: int
    sizes: tuple[tuple[int, int], ...]
    separated: tuple[float, ...]
    overlapping: tuple[float, ...]
    places: tuple[float, ...]
    twins: tuple[tuple[int, int, float, float], ...]
    points: int


@dataclass(frozen=True, kw_only=True)
class PropositionKL(ModelSettings):
    """`tables` random joint distributions; `bins` quantile bins of the features' histograms;
    `resamples` of the samples give the errors of the divergences."""

    seed: int
    tables: int
    bins: int
    resamples: int = 200


@dataclass(frozen=True, kw_only=True)
class Complexity(Settings):
    """Costs over `classes` at `fixed_width`, and over `widths` at `fixed_classes`; `bank` training
    samples are searched by KNN; `budget` seconds are spent on each measurement."""

    fixed_width: int
    fixed_classes: int
    batch: int
    bank: int
    budget: float
    classes: tuple[int, ...]
    widths: tuple[int, ...]
    #: the network whose passes ODIN pays for, and the side of its images
    network: str = "resnet10_compact"
    side: int = 32


@dataclass(frozen=True, kw_only=True)
class Description:
    """The entries of an experiment's file that are the same at all scales."""

    kind: str
    title: str
    claim: str
    place: str = ""
    order: float = 100.0
    #: what the experiment asks beyond the paper, in one sentence
    question: str = ""
    small: dict[str, Any] = field(default_factory=dict)
    public: dict[str, Any] = field(default_factory=dict)
    paper: dict[str, Any] = field(default_factory=dict)


KINDS: dict[str, type[Settings]] = {
    "detector-table": DetectorTable,
    "percentiles": Percentiles,
    "regularization-gain": ModelSettings,
    "domain-shift": DomainShift,
    "overview": ModelSettings,
    "regularization": ModelSettings,
    "deviation": Deviation,
    "distances": Distances,
    "nearest-k": NearestK,
    "distance-quality": DistanceQuality,
    "theorem": Theorem,
    "proposition-1": PropositionOne,
    "proposition-2": PropositionTwo,
    "proposition-kl": PropositionKL,
    "complexity": Complexity,
}
"""The schema of each kind of experiment, by the `kind` that its file gives."""
