"""What the pictures of all scripts have in common: their size of letters, their frame, and their two files."""
import os
import sys

COLOURS = ("#444444", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#1f78b4", "#a6761d")


def pyplot():
    """Matplotlib's pyplot, for files. Text in an SVG stays text, and the same picture has the same bytes."""
    import matplotlib  # pylint: disable=import-outside-toplevel
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "train_llama2", "svg.fonttype": "none", "axes.grid": True,
                                "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False,
                                "legend.frameon": False, "legend.fontsize": 9})
    import matplotlib.pyplot as plt  # pylint: disable=import-outside-toplevel
    return plt


def literal(text):
    """A name for pictures as it is: Matplotlib takes what stands between two $ for a formula."""
    return text.replace("$", r"\$")


def save(figure, path):
    """Writes the picture as PNG and as SVG, and returns a line that says where. path: of one of them."""
    stem = os.path.splitext(path)[0] if path.endswith((".png", ".svg")) else path
    figure.tight_layout()
    try:
        figure.savefig(stem + ".png", dpi=130, metadata={"Software": None})
        figure.savefig(stem + ".svg", metadata={"Date": None, "Creator": None})
    except OSError as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: cannot write the picture {stem}.png: {error.strerror}")
    return f"picture: {stem}.png and {os.path.basename(stem)}.svg"
