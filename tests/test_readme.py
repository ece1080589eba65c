"The Python of the README runs as it stands there."
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rookworld_nb.run import train
from short_runs import SHORT

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


def test_another_task_than_chess_is_learned(run_snippet, tmp_path):
    """From random weights to what the comment beside it says; the same with every run."""
    with torch.random.fork_rng(devices=[]): names = run_snippet('count_a')
    rewards = names['rows']['reward']
    assert rewards.iloc[0] < .05 and rewards.iloc[-1] > .98 and (tmp_path/'letters.png').stat().st_size > 10_000
    first, last = (re.search(r'from \.(\d+) to \.(\d+), in seconds', next(one for one in SNIPPETS if 'count_a' in one))).groups()
    assert f'{rewards.iloc[0]:.2f}' == f'0.{first}' and f'{rewards.iloc[-1]:.2f}' == f'0.{last}'


def test_a_run_is_read_and_paid_as_it_was(run_snippet, tmp_path, capsys):
    train(replace(SHORT, steps=2, eval_policy=0, eval_env=0, output_dir='runs/mine'))
    names = run_snippet('read_metrics')
    assert list(names['rows']['step']) == [1, 2] and (tmp_path/'curves.png').exists()
    assert names['pay'].cfg.reward_shaping == 'continuous' and 'candidates' in capsys.readouterr().out


def test_the_model_answers(run_snippet):
    assert len(run_snippet('print(rollouts.texts)')['rollouts'].texts) == 4


def test_a_loop_of_ones_own_learns_from_what_it_sampled(run_snippet, capsys):
    with torch.random.fork_rng(devices=[]): names = run_snippet('optimizer.zero_grad()')
    lines = re.findall(r'reward (\S+), KL (\S+), largest ratio (\S+)', capsys.readouterr().out)
    assert len(lines) == 3 and all(abs(float(ratio) - 1) < 1e-3 for *_, ratio in lines) and float(lines[0][1]) < 1e-4 < float(lines[2][1]) < .05
    assert any(p.ne(q).any() for p, q in zip(names['model'].parameters(), names['reference'].parameters()))
