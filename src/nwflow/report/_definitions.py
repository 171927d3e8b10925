"""The words of a report: what each number means, as the measurement defines it."""

REGIMES = {
    "collapse": "Nearest-neighbour collapse",
    "geometry": "Geometry mismatch",
    "scarcity": "Too few references",
    "healthy": "Healthy",
}

UNITS = {
    "raw": "raw error, per coordinate over the data scale squared",
    "relative": "relative error, each principal direction over its own variance",
}

DEFINITIONS: tuple[tuple[str, str], ...] = (
    ("Time", "t = 0 is noise, t = 1 is data. X_t = α X₁ + σ X₀, and the bandwidth is h = σ / α."),
    (
        "Data scale",
        "s = √(tr Cov / d), the root mean variance of a coordinate. Bandwidths are compared with it.",
    ),
    (
        "log-SNR",
        "log(α² s² / σ²), with s the data scale: 0 is where noise and data are of one size, left of it is noise, "
        "right of it data.",
    ),
    (
        "Plug-in",
        "The denoiser of the references as they are: D = Σ wᵢ sᵢ, the Nadaraya-Watson smoother that exact "
        "conditioning on them computes.",
    ),
    ("Linear denoiser", "The best linear function of the noisy point, from the mean and covariance of the references."),
    (
        "Error",
        "E|D − x₁|² of held-out points, which the denoiser has not seen. Raw: per coordinate over s²; 1 is the error "
        "of always answering the mean. Relative: the mean over principal directions of the error over that "
        "direction's own variance, so that small directions count as large ones do.",
    ),
    (
        "Skill",
        "1 − error / error of the linear denoiser. 0: as good as the linear one; 1: no error; below 0: worse than "
        "using mean and covariance alone.",
    ),
    (
        "Deciding window",
        "The part of the path where the linear denoiser leaves more than 5 % of the variance. Later any denoiser can "
        "read the answer off its input. Means over the path are taken in the window.",
    ),
    (
        "Effective references, n_eff",
        "1 / Σ wᵢ²: how many references share the weight of a denoised point. 1 is a copy of the nearest. "
        "Largest weight and entropy (in nats) say the same of the weights in two other ways; bands hold the "
        "middle 80 % of the queries.",
    ),
    (
        "Share of the error (the three gauges)",
        "Each regime has an intervention that takes its cause away and leaves the rest: the share of the plug-in's "
        "error that it removes is what the regime costs. Shares need not add up to 100 %.",
    ),
    ("Interval", "95 %, over held-out points, unless it is said otherwise."),
    (
        "Copy",
        "A sample whose nearest reference is much closer than the second: a ratio of distances below 1/3.",
    ),
    (
        "Intrinsic dimension",
        "The number of directions in which the data really vary near a point, by several estimators that differ in "
        "what they assume.",
    ),
    (
        "Relative contrast",
        "(mean distance − nearest distance) / nearest distance. Near 0 all points are about equally far, and "
        "distances say little.",
    ),
    (
        "Participation ratio",
        "(Σ λ)² / Σ λ² of the variances λ along principal directions: how many directions carry the variance. "
        "Anisotropy is (R − participation) / (R − 1), with R the ratio of a round cloud of as many points: 0 is "
        "round, 1 a line.",
    ),
    (
        "Learning curves",
        "Errors with fewer references, over the error of the linear denoiser at full size; values at sizes that "
        "were not measured are extrapolated and drawn dashed with open markers.",
    ),
    (
        "Minimax exponent",
        "4 / (4 + d) at the intrinsic dimension d: how fast errors of smooth functions can fall with the number of "
        "references.",
    ),
    ("MMD²", "Squared maximum mean discrepancy of samples to held-out points; 0 where the two agree."),
)
