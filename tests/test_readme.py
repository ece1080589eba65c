"The Python of the README runs as it stands there. (The recipes are a notebook, and tested as one.)"
import re
from dataclasses import replace
from pathlib import Path

import pytest

from rookworld_nb.records import read_metrics
from rookworld_nb.run import train
from short_runs import TINY

SNIPPETS = re.findall(r'^```python\n(.*?)^```', Path(__file__).parent.with_name('README.md').read_text(encoding='utf-8'), re.M | re.S)


@pytest.fixture
def run_snippet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    def run(word):
        snippet, = (one for one in SNIPPETS if word in one)
        names = {}
        exec(snippet, names)
        return names
    return run


def test_a_model_learns_a_letter(run_snippet):
    assert run_snippet('grpo_loss(')['rewards'].mean() > .9


def test_the_model_answers(run_snippet):
    assert len(run_snippet('print(rollouts.texts)')['rollouts'].texts) == 4


def test_a_run_is_trained_continued_and_reported(run_snippet, monkeypatch, capsys):
    small = replace(TINY, eval_policy=6, eval_env=3, eval_samples=2)
    monkeypatch.setattr('rookworld_nb.run.train', lambda config: train(
        config if config.resume else replace(small, steps=config.steps, output_dir=config.output_dir)))
    table = run_snippet('train(TrainConfig(')['table']
    assert {'before', 'after', 'standard_error'} <= {*table} and list(read_metrics('runs/mine')['step']) == [*range(1, 31)]
    said = capsys.readouterr().out
    assert said.count('held-out positions before the first update') == 1    # a run that goes on reads what is kept
    page = said.splitlines()[-1]
    assert page == 'runs/mine/report.html' and Path(page).stat().st_size > 10_000


def test_nothing_of_it_is_left_out():
    assert len(SNIPPETS) == 3
