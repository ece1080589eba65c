"The Python of the README runs as it stands there."
import json
import re
from dataclasses import replace
from pathlib import Path

import chess
import pytest
import torch

from rookworld_nb.positions import shipped
from rookworld_nb.run import Run, train
from rookworld_nb.weights import load_pretrained, save_pretrained
from short_runs import SHORT

SNIPPETS = re.findall(r'^```python\n(.*?)^```', Path(__file__).parent.with_name('README.md').read_text(encoding='utf-8'), re.M | re.S)


@pytest.fixture
def run_snippet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    def run(word, names=None):
        snippet, = (one for one in SNIPPETS if word in one)
        names = {} if names is None else names
        exec(snippet, names)
        return names
    return run


def learns_from_own_advantages(names):
    "Those of the second snippet, in the task of the first; and they are what the text says."
    torch.manual_seed(0)
    model = names['GPT'](names['model'].cfg)
    collector = names['Collector'](model, None, names['tokenizer'], names['repeat'](names['prompts']), names['count_a'], names['config'])
    trainer = names['Trainer'](model, replace(names['trainer'].config, steps=70))
    rewards = [row['reward'] for row in trainer.run(map(names['beaten'], collector))]
    assert rewards[0] < .05 and rewards[-1] > .6, rewards
    part = names['beaten'](next(collector)).parts[0]
    for rewards, advantages in zip(part.rewards.view(-1, 8), part.advantages.view(-1, 8)):
        by_hand = [(sum(one > other for other in rewards) - sum(one < other for other in rewards))/7 for one in rewards]
        torch.testing.assert_close(advantages, torch.stack(by_hand).float())


def test_another_task_than_chess_is_learned(run_snippet, tmp_path):
    """From random weights to what the comment beside it says; the same with every run."""
    with torch.random.fork_rng(devices=[]):
        names = run_snippet('count_a')
        learns_from_own_advantages(run_snippet('def beaten', names))
    rewards = names['rows']['reward']
    assert rewards.iloc[0] < .05 and rewards.iloc[-1] > .98 and (tmp_path/'letters.png').stat().st_size > 10_000
    first, last = (re.search(r'from \.(\d+) to \.(\d+), in seconds', next(one for one in SNIPPETS if 'count_a' in one))).groups()
    assert f'{rewards.iloc[0]:.2f}' == f'0.{first}' and f'{rewards.iloc[-1]:.2f}' == f'0.{last}'


def test_games_in_pgn_give_positions(run_snippet, tmp_path):
    games = ('[White "Anna"]\n[Black "Ben"]\n\n1. e4 e5 2. Nf3 *\n', '[White "Ben"]\n[Black "Anna"]\n\n1. d4 d5 2. c4 e6 *\n')
    (tmp_path/'games.pgn').write_text('\n'.join(games))
    run_snippet('import chess.pgn')
    fens = (tmp_path/'fens.txt').read_text().splitlines()
    assert [fen.split()[1] for fen in fens] == ['w', 'w', 'b', 'b'] and fens[0] == chess.STARTING_FEN
    assert chess.Board(fens[2]).piece_at(chess.D4) and chess.Board(fens[3]).piece_at(chess.C4)


def test_a_run_is_read_and_paid_as_it_was(run_snippet, tmp_path, capsys):
    train(replace(SHORT, steps=2, eval_policy=0, eval_env=0, output_dir='runs/mine'))
    names = run_snippet('read_metrics')
    assert list(names['rows']['step']) == [1, 2] and (tmp_path/'curves.png').exists()
    assert names['pay'].cfg.reward_shaping == 'continuous' and 'candidates' in capsys.readouterr().out


def test_the_model_answers(run_snippet):
    assert len(run_snippet('print(rollouts.texts)')['rollouts'].texts) == 4


def test_a_loop_of_ones_own_learns_from_what_it_sampled(run_snippet, capsys):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)    # of the sampling, whatever ran before
        names = run_snippet('optimizer.zero_grad()')
    lines = re.findall(r'reward (\S+), KL (\S+), largest ratio (\S+)', capsys.readouterr().out)
    assert len(lines) == 3 and all(abs(float(ratio) - 1) < 1e-3 for *_, ratio in lines) and float(lines[0][1]) < 1e-4 < float(lines[2][1]) < .05
    assert any(p.ne(q).any() for p, q in zip(names['model'].parameters(), names['reference'].parameters()))


def test_a_run_is_watched_step_by_step(run_snippet, monkeypatch, capsys):
    monkeypatch.setattr('rookworld_nb.run.Run', lambda config: Run(replace(SHORT, steps=2, output_dir=config.output_dir)))
    table = run_snippet('finish(run, before')['table']
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [step for step, *_ in said] == ['1', '2'] and all(float(letters) > 1 for *_, letters in said)
    assert {'before', 'after'} <= {*table} and json.loads(Path('runs/watched/summary.json').read_text())['steps'] == 2


def test_two_models_are_compared(run_snippet, monkeypatch, capsys):
    monkeypatch.setattr('rookworld_nb.positions.shipped', lambda name: shipped(name)[:12])
    save_pretrained(*load_pretrained('nano'), 'runs/mine/final_checkpoint')
    names = run_snippet('print(compare(')
    assert (names['before']['reward'] == names['after']['reward']).all() and 'difference' in capsys.readouterr().out
