"""The picture of the README: reward of the answers sampled in training, by task.

    python benchmarks/learning_curve.py runs/long-* --png nbs/images/learning_curve.png

Pale: each run; dark: their mean. Both are means over 50 updates. Runs must have the same number of updates.
"""
import argparse
from pathlib import Path

import pandas as pd

from rookworld_nb.monitor import BLUE, ORANGE, Picture
from rookworld_nb.records import read_metrics

WINDOW = 50
TITLES = {'P': 'P: policy, sampled reward', 'A': 'A: environment, sampled reward'}


def main():
    options = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    options.add_argument('runs', nargs='+', type=Path, help='finished run folders')
    options.add_argument('--png', type=Path, required=True, help='file to write')
    options = options.parse_args()
    picture = Picture(8.4, 2.6)
    for task, colour, panel in zip(TITLES, (BLUE, ORANGE), picture.grid(1, 2)):
        curves = pd.DataFrame({run.name: read_metrics(run).set_index('step')[f'task_{task}/reward'] for run in options.runs})
        smooth = curves.rolling(WINDOW, center=True).mean()
        panel.plot(smooth, color=colour, alpha=.35, lw=1.2)
        panel.plot(smooth.mean(axis=1, skipna=False), color=colour, lw=2.6)
        panel.set_title(TITLES[task], loc='left')
        panel.set_xlabel('update')
    picture.tight_layout()
    options.png.write_bytes(picture._repr_png_())


if __name__ == '__main__':
    main()
