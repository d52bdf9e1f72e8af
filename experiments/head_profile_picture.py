"""Pictures of a head profile: heat map over layers and heads, box plots over samples.

A profile enters, a PNG leaves: the shapes of the paper's Figures 2(a) and 6.
"""

import pathlib

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvgrain_jax.budgets import HeadProfile

COLOURS = ("#0b4f8a", "#e08e2b", "#5e8f3a", "#8c3b68")
LAYERS_SHOWN = 3


def draw_profile(path: pathlib.Path, title: str, profile: HeadProfile) -> None:
    """Draws a profile.

    Args:
      path: the PNG to write.
      title: what it is of.
      profile: the samples. Box plots show the layers whose heads differ most.
    """
    figure = Figure(figsize=(12.5, 6.4), layout="constrained")
    figure.suptitle(title, fontsize=13, x=0.01, ha="left")
    grid = figure.add_gridspec(2, LAYERS_SHOWN, height_ratios=[1.0, 1.2])
    _heat_map(figure.add_subplot(grid[0, :]), profile)
    spread = profile.mean.std(axis=1)
    layers = np.sort(np.argsort(-spread, kind="stable")[:LAYERS_SHOWN])
    for index, layer in enumerate(layers):
        axis = figure.add_subplot(grid[1, index])
        _boxes(axis, profile, int(layer))
        if index == 0:
            axis.set_ylabel("retained, % of unprotected")
            handles, labels = axis.get_legend_handles_labels()
            figure.legend(handles, labels, loc="upper right", frameon=False, ncols=len(labels))
    figure.savefig(path, dpi=150)


def _heat_map(axis: Axes, profile: HeadProfile) -> None:
    image = axis.imshow(100 * profile.mean.T, aspect="auto", cmap="viridis", vmin=0)
    axis.figure.colorbar(image, ax=axis, label="mean retained, %", pad=0.01)
    axis.set_xlabel("layer")
    axis.set_ylabel("KV head")
    axis.set_yticks(range(profile.n_kv_heads))
    axis.set_title("What each head keeps of the unprotected tokens", fontsize=11, loc="left")


def _boxes(axis: Axes, profile: HeadProfile, layer: int) -> None:
    names = sorted(set(profile.domains))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        colour = COLOURS[index % len(COLOURS)]
        axis.boxplot(
            100 * profile.of_domain(name).fractions[:, layer],
            positions=np.arange(profile.n_kv_heads) + (index - (len(names) - 1) / 2) * width,
            widths=0.85 * width,
            patch_artist=True,
            flierprops={"markersize": 2, "markeredgecolor": colour},
            medianprops={"color": "black"},
            boxprops={"facecolor": colour, "edgecolor": colour},
            whiskerprops={"color": colour},
            capprops={"color": colour},
        )
        axis.bar(0, 0, color=colour, label=name)
    axis.set_xticks(range(profile.n_kv_heads), [str(i) for i in range(profile.n_kv_heads)])
    axis.set_ylim(-3, 103)
    axis.set_xlabel("KV head")
    axis.set_title(f"Layer {layer}", fontsize=11, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
