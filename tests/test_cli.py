"""The command line: every flag arrives, every mistake costs one line, every command does what it says."""
import functools
import io
import json
import math
import os
import pkgutil
import random
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from types import NoneType
from typing import Literal, get_args, get_origin

import chess
import pandas as pd
import pytest
import torch

from rookworld_nb import cli
from rookworld_nb.cli import COMMANDS, evaluation_samples, main
from rookworld_nb import evaluate as evaluate_module
from rookworld_nb.config import PRESETS, SMALL as SMALL_MODEL, TrainConfig
from rookworld_nb.evaluate import TASK_METRICS, compare, evaluate
from rookworld_nb.flags import REQUIRED, UsageError, as_text, flags_of
from rookworld_nb.grpo import MissingInputError
from rookworld_nb.kl import BatchShapeError
from rookworld_nb.model import GPT, GPTConfig, SequenceError
from rookworld_nb.positions import OPENINGS, by_task, data_files, locked, opening_positions, read_lines, shipped
from rookworld_nb.pretrain import board_tokenizer, read_excluded
from rookworld_nb.ranks import ALONE
from rookworld_nb.rewards import RewardScorer
from rookworld_nb.rules import PATIENCE, Candidate, EngineError, EngineNotFoundError, env_step, find_stockfish, legal_moves
from rookworld_nb.run import Run
from rookworld_nb.scale import WorkersLostError
from rookworld_nb.tasks import env_prompt, format_env
from rookworld_nb.trainer import FirstUpdateError
from rookworld_nb.weights import load_pretrained, save_pretrained

START = 'rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1'
SCRIPT = Path(sys.executable).parent/'rookworld'
read_once = functools.cache(shipped)
POLICY = ' M: e2e4 d2d4 g1f3 c2c4 b1c3 E: 0.3 0.3 0.2 0.1 0.0 B: e2e4'


@pytest.fixture(scope='module')
def tiny(tmp_path_factory) -> str:
    """A folder with a random model of one small layer."""
    tokenizer = board_tokenizer()
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=tokenizer.get_vocab_size(), n_positions=256))
    return str(save_pretrained(model, tokenizer, tmp_path_factory.mktemp('tiny')/'model'))


@pytest.fixture
def cwd(tmp_path, monkeypatch) -> Path:
    """An empty working directory."""
    (tmp_path/'here').mkdir()
    monkeypatch.chdir(tmp_path/'here')
    return tmp_path/'here'


@pytest.fixture
def call(capsys, monkeypatch):
    """Run a command; the exit code, the lines of its output, the text of its errors."""
    def run(*words: str, stdin: str = '') -> tuple[int, list[str], str]:
        monkeypatch.setattr(sys, 'stdin', io.StringIO(stdin))
        code = main([str(word) for word in words])
        done = capsys.readouterr()
        return code, done.out.splitlines(), done.err
    return run


def env_lines(n: int, seed: int = 0) -> list[str]:
    """A: lines of one random game."""
    rng, fen, lines = random.Random(seed), START, []
    while len(lines) < n and legal_moves(fen):
        uci = rng.choice(sorted(legal_moves(fen)))
        step = env_step(fen, uci)
        lines.append(format_env(fen, uci, None, *step))
        fen = step.new_fen
    return lines


def sources(name: str) -> list:
    """The function of a command and its configuration, if it takes one."""
    command = COMMANDS[name]
    return [command.run, *([pkgutil.resolve_name(command.config)] if command.config else [])]


def flags(name):
    """All flags of a command."""
    own, *configs = sources(name)
    return [*flags_of(own).values(), *(flag for each in configs for flag in flags_of(each, COMMANDS[name].without).values())]


# ---- flags

@pytest.mark.parametrize('name', COMMANDS)
def test_every_flag_has_help_and_shows_its_default(name, call, monkeypatch):
    monkeypatch.setenv('COLUMNS', '1000')  # no wrapping
    code, lines, _ = call(name, '--help')
    text = ' '.join(' '.join(lines).split())
    assert code == 0
    for flag in flags(name):
        after = '' if flag.many else ' (required)' if flag.default is REQUIRED else f' (default: {as_text(flag.default)})'
        assert flag.word in text and len(flag.help) > 4 and flag.help + after in text, flag


@pytest.mark.parametrize('name', COMMANDS)
def test_flags_do_not_collide(name):
    words = [flag.word for flag in flags(name)]
    assert len(words) == len(set(words)) and '--config' not in words and '--help' not in words


def other_values(kind, default, about: str = '') -> list:
    """Values of a kind that differ from a default; texts are tried from the help, which names them."""
    options = [option for option in get_args(kind) if option not in (NoneType, ...)]
    if get_origin(kind) is Literal or kind is bool:
        return [value for value in options or (True, False) if value != default]
    if get_origin(kind) is tuple:
        return [(value,) for value in other_values(options[0], None) if (value,) != default]
    if options:
        return other_values(options[0], default, about)
    values = {int: [2, 3, 8, 16, 1, 40], float: [.25, .75, .5, 1.5, 20., -.5], str: ['cpu', *re.findall(r'\w+', about)], Path: [Path('x')]}
    return [value for value in values[kind] if value != default]


@pytest.mark.parametrize('name', COMMANDS)
def test_every_flag_arrives(name, monkeypatch, cwd):
    """Set each flag alone, as a word and in a file: exactly that setting changes, and it reaches the command."""
    received = {}
    run, *classes = sources(name)
    kinds = [flag for flag in flags(name) if not flag.many]

    def record(*words, config=None, **settings):
        received.clear()
        for cls in classes: received.update(vars(cls(**config)))
        received.update(settings)
    monkeypatch.setattr(cli, 'flags_of', lambda target, *without: flags_of(run if target is record else target, *without))
    record.__doc__ = run.__doc__
    monkeypatch.setitem(COMMANDS, name, COMMANDS[name]._replace(run=record))
    required = lambda but=None: [word for flag in kinds if flag.default is REQUIRED and flag is not but for word in (flag.word, 'x')]
    assert main([name, *required()]) == 0
    before = dict(received)
    company = {name: ['--use-gae'] for name in ('gamma', 'gae_lambda', 'value_loss_coef')} | {
        'fresh_share': ['--buffer-capacity', '2'], 'kl_warmup_factor': ['--kl-warmup-steps', '3'], 'kl_target': ['--kl-control', 'adaptive'],
        'answer_positions': ['--answer-coef', '0.5'], 'penalty': ['--credit', 'answer'], 'engine_cache': ['--stockfish-path', 'x'], **dict.fromkeys(('normalize_momentum', 'normalize_floor'), ['--normalize-rewards'])}
    for flag in kinds:
        others = company.get(flag.name, []) if 'use_gae' in before else []    # of no use alone
        assert main([name, *required(), *others]) == 0
        before, arrived = dict(received), []
        for value in other_values(flag.kind, flag.default, flag.help):
            switch = flag.word if value else flag.word.replace('--', '--no-')
            words = [*others, switch] if flag.kind is bool else [*others, flag.word, as_text(value)]
            if main([name, *required(), *words]) != 0:
                continue  # the configuration refuses it
            assert received[flag.name] == value
            assert {k: v for k, v in received.items() if k != flag.name and before.get(k, flag) != v and k in before} == {}
            toml = as_text(value) if flag.kind is bool else json.dumps(as_text(value))
            Path('settings.toml').write_text(f'{flag.word[2:]} = {toml}\n')
            assert main([name, *required(flag), *others, '--config', 'settings.toml']) == 0 and received[flag.name] == value
            arrived.append(value)
            break
        assert arrived, f'{flag.word}: no value was accepted'


@pytest.mark.parametrize('words, hint', [('train --learning-rate 1e-4', 'there is no flag --learning-rate; did you mean --lr'),
                                         ('train --resume old', "--resume takes no value, but got 'old'; a folder is named with --output-dir"),
                                         ('eval old', "'old' belongs to no flag; a folder is named with --model"),
                                         ('train --config own.toml', 'a text needs quotes, as in data = "own.txt"')])
def test_a_likely_mistake_is_answered_with_what_was_meant(words, hint, call, cwd):
    (cwd/'old').mkdir()
    (cwd/'own.toml').write_text('data = own.txt\n')
    code, lines, errors = call(*words.split())
    assert code == 2 and lines == [] and hint in errors


def test_a_limited_evaluation_takes_its_lines_from_everywhere():
    whole = by_task(shipped('heldout'))
    few = cli.evaluation_samples(None, ('policy', 'env'), 3)
    assert few == [found[at] for found in (whole['P'], whole['A']) for at in (0, round((len(found) - 1)/2), len(found) - 1)]
    assert cli.evaluation_samples(None, ('policy',), None) == whole['P']


def test_flags_overrule_the_file_and_the_file_the_defaults(call, cwd):
    (cwd/'a.toml').write_text('n = 5\nseed = 3\n')
    expected = call('positions', '--n', '6', '--seed', '3')
    assert call('positions', '--config', 'a.toml', '--n', '6') == expected
    assert call('positions', '--n', '6', '--config=a.toml') == expected
    assert len(call('positions', '--config', 'a.toml')[1]) == 5


# ---- mistakes

ROW = json.dumps({'prompt': env_prompt(START, 'e2e4'), 'completion': ''})
PROMPT = f'P: {START}'
MISTAKES = [
    ('', '', ['train', 'positions']),
    ('trian', '', ['trian', 'train']),
    ('--help-me', '', ['--help-me', 'train']),
    ('positions --sed 3', '', ['--sed', '--seed']),
    ('positions --se 3', '', ['--se']),
    ('positions extra', '', ['extra']),
    ('positions --n', '', ['--n']),
    ('positions --n ten', '', ['--n', 'ten', 'whole number']),
    ('generate --seed 99999999999999999999', PROMPT, ['--seed', '99999999999999999999', '2^63']),
    ('positions --n 0', '', ['0', 'at least 1']),
    ('positions --seed=1.5', '', ['--seed', '1.5']),
    ('positions --config no.toml', '', ['no.toml']),
    ('positions --config bad.toml', '', ['bad.toml', 'TOML']),
    ('positions --config key.toml', '', ['key.toml', 'seeds', 'seed']),
    ('positions --config table.toml', '', ['table.toml', 'n', 'table']),
    ('positions --config value.toml', '', ['value.toml', 'n', 'many']),
    ('positions --config list.toml', '', ['list.toml', 'n is a list']),
    ('generate --config twice.toml', '', ['twice.toml', 'max_new_tokens', 'twice']),
    ('train --config train.toml', '', ['train.toml', 'train is a table', 'name = value']),
    ('generate', '', ['no prompts']),
    ('generate', f'A: {START}+e2e4+d2d4+', ['+e2e4+d2d4+', 'must end with e2e4']), ('generate', f'A: {START}+e2e4++', ['must end with e2e4']),
    ('generate --group-size 2', PROMPT, ['--group-size 2', 'alike', '--temperature']),
    ('generate hello', '', ['hello', 'P: ']),
    ('generate', 'P: hello', ['P: hello', 'a FEN']), ('generate', PROMPT + '\nA: x+y', ['A: x+y', 'fen+uci+history+']),
    ('generate', 'P: 8/8/8/8/8/8/8/8 w - - 0 1', ['8/8/8/8/8/8/8/8 w', 'impossible position', '(no white king, no black king, empty)']),
    ('generate --temperature -1', PROMPT, ['temperature', '-1']),
    ('generate --temperature nan', PROMPT, ['--temperature', 'nan']),
    ('generate --group-size 0', PROMPT, ['--group-size', '0']),
    ('generate --max-new-tokens 0', PROMPT, ['--max-new-tokens', '0']),
    ('generate --batch-size 0', PROMPT, ['--batch-size', '0']),
    ('generate --device tpu', PROMPT, ['--device', 'tpu', 'no such kind of device); valid: auto, cpu']),
    ('generate --device cuda:99', PROMPT, ['--device', 'cuda:99', 'cpu']),
    ('generate --model no/such/folder', PROMPT, ['no/such/folder']),
    ('generate --model here', PROMPT, ['here']),
    ('eval --model run', '', ['run folder', 'run/final_checkpoint']), ('eval --model empty', '', ['no config.json', 'empty']),
    ('score utf16.txt', '', ['utf16.txt', 'UTF-8 text']), ('train --data onlyp.txt', '', ['A: prompts', 'give 0']),
    ('train --output-dir bad.toml/run', '', ['--output-dir', 'bad.toml']), ('pretrain --n-head 7', '', ['--n-head 7', '160']),
    ('pretrain --lr -1', '', ['--lr -1']), ('train --resume --output-dir torn', '', ['torn/config.json', 'cannot be read as JSON']),
    ('score', '', ['no rows']),
    ('score no.jsonl', '', ['no.jsonl']),
    ('score', ROW + '\nnonsense', ['line 2', 'JSON']), ('score --nodes 0', ROW, ['--nodes', '0']), ('score --nodes 5', ROW, ['--nodes 5', '--engine']), ('label --shards 0', START, ['--shards', '0']),
    ('score', '{"prompt": "A: ' + START + '+e2e4", "completion": "x"}', ['line 1', 'fen+uci+history+']),
    ('pretrain --output-dir made --exclude gone.txt', '', ['--exclude gone.txt', 'No such file']),
    ('eval --suite puzzles --data header.csv', '', ['header.csv', 'no puzzle']),
    ('score', ROW + '\n{"prompt": "P: x"}', ['line 2', 'completion']),
    ('score', ROW + '\n{"prompt": "P: x", "completion": 5}', ['line 2: completion must be a text, not 5']),
    ('train --kl-divergence-threshold 0', '', ['--kl-divergence-threshold 0', 'above 0, or none']), ('train --lr fast', '', ["'fast' is not a", 'or none']),
    ('label --input onlyp.txt --output nodir/x.txt', '', ['nodir/x.txt', 'no folder nodir']),
    ('score', ROW + '\n[1]', ['line 2', 'object']), ('score utf16.txt onlyp.txt', '', ['utf16.txt', 'UTF-8 text']),
    ('score --best-weight 1e308 --policy-format-weight 1e308', ROW, ['weights', 'added up']), ('label', '{"fen":' + '['*100_000, ['standard input, line 1']),
    ('label --output /dev/null', START, ['--output /dev/null', 'a plain text file']),
    ('score', ROW[:-1] + ', "target": 3}', ['line 1', 'target', '3']),
    ('score', ROW + '\n{"prompt": "hello", "completion": ""}', ['line 2', 'hello']),
    ('score', ROW + '\n\n' + json.dumps({'prompt': f'P: {START}', 'completion': ''}), ['line 3', START, '--engine']),
    ('score', ROW + '\n' + json.dumps({'prompt': f'P: {START}', 'completion': '', 'target': 'y'}), ['line 2', "target 'y'"]),
    ('score --reward-shaping cubic', ROW, ['--reward-shaping', 'cubic', 'graduated']),
    ('score --penalty 1', ROW, ['penalty', '1']),
    ('score --penalty 2', '', ['penalty', '2']),
    ('eval --json=maybe', '', ['takes no value', 'maybe']),
    ('score --nodes 0 --engine', ROW, ['nodes', '0']),
    ('score --stockfish-path no/engine', ROW, ['no/engine']),
    ('label', '', ['no FENs']),
    ('label --output out.txt', 'hello', ['standard input, line 1', 'hello']),
    ('label --workers 0', START, ['--workers', '0']),
    ('label --output out.txt', START + '\n' + START.replace('k', 'q'), ['standard input, line 2']),
    ('label --output out.txt', START + '\n' + START.rsplit(' ', 2)[0], ['standard input, line 2']),
    ('label --output out.txt.gz', START, ['out.txt.gz', 'a plain text file']),
    ('label --output out.txt --workers 0', START, ['0']),
    ('label --output out.txt --nodes -5', START, ['nodes', '-5']),
    ('label --output out.txt --stockfish-path no/engine', START, ['no/engine']),
    ('label --output no/folder/out.txt', START, ['no/folder']),
    ('eval --suite chess', '', ['--suite', 'chess', 'policy, env']),
    ('eval --data no.txt', '', ['no.txt']),
    ('eval --data bad.toml', '', ['bad.toml', 'malformed']),
    ('eval --data lines.txt --limit 0', '', ['--limit', '0']),
    ('eval --data lines.txt --temperature 0,x', '', ['--temperature', 'x']),
    ('eval --data lines.txt --temperature=-1', '', ['temperature', '-1']),
    ('eval --data lines.txt --samples-per-prompt 0', '', ['--samples-per-prompt', '0']),
    ('eval --data lines.txt --samples-per-prompt 4', '', ['--samples-per-prompt 4', 'give a --temperature above 0']),
    ('eval --data lines.txt --max-new-tokens 0', '', ['--max-new-tokens', '0']),
    ('eval --data lines.txt --batch-size 0', '', ['--batch-size', '0']),
    ('eval --data lines.txt --model no/such/folder', '', ['no/such/folder']),
    ('eval --suite selfplay --games 107', '', ['--games 107: must be even, 2 to 106']), ('eval --suite env --data onlyp.txt', '', ['--data onlyp.txt: holds no A: line for --suite env; 1 good, 0 malformed']),
    ('eval --suite mate --games 4', '', ['--games 4', 'selfplay,stockfish', 'mate']), ('eval --suite mate --max-new-tokens 9', '', ['--max-new-tokens 9']),
    ('eval --suite policy,selfplay --stockfish-path gone', '', ['--stockfish-path gone', 'stockfish']),
    ('eval --suite selfplay --limit 2', '', ['--limit 2', 'selfplay']), ('eval --temperature .5,1,0.5', '', ['--temperature 0.5,1.0,0.5', 'more than once']),
    ('eval --model killed', '', ["run folder: its model is 'killed/checkpoint-10'"]), ('eval --model goneon', '', ["run folder: its model is 'goneon/checkpoint-10'"]), ('eval --model begun', '', ['run folder', 'no model yet']),
    ('train --preset rtx4090 --group-size 3', '', ['--micro-batch-size 32', '--preset rtx4090']),
    ('eval --suite puzzles', '', ['puzzles', '--data', 'Lichess']),
    ('eval --suite puzzles,env --data lines.txt', '', ['puzzles', 'env']),
    ('eval --suite puzzles --data lines.txt', '', ['lines.txt']),
    ('eval --suite mate --data lines.txt', '', ['lines.txt', 'mate']),
    ('eval --suite selfplay --games 3', '', ['--games 3', 'even', '2 to']),
    ('eval --suite stockfish --stockfish-path /bin/true', '', ['/bin/true']),
    ('eval --suite policy --history-plies 11', '', ['--history-plies 11']),
    ('eval --suite ,', '', ['--suite', 'empty list']),
    ('eval --temperature ,', '', ['--temperature', 'empty list']),
    ('eval --suite puzzles --data packed.csv.zst', '', ['packed.csv.zst', '.zst']),
    ('eval --suite puzzles --data false.csv.gz', '', ['false.csv.gz']),
    ('eval --data packed.csv.zst', '', ['packed.csv.zst', '.zst']),
    ('train --data false.csv.gz', '', ['false.csv.gz']),
    ('eval --suite puzzles --data blank.csv', '', ['blank.csv, line 2']),
    ('eval --suite env,stress', '', ['stress', 'env']), ('eval --suite stress --data lines.txt', '', ['lines.txt', 'stress']),
    ('eval --suite mate --against nano', '', ['--against nano', 'mate']), ('eval --against /no/such', '', ['/no/such']),
    ('eval --suite selfplay --games 10000', '', ['--games 10000']),
    ('eval --suite selfplay --history-plies 0', '', ['--history-plies 0']),
    ('eval --suite stockfish --stockfish-path no/engine', '', ['no/engine']),
    ('train --steps 0', '', ['--steps', '0']),
    ('train --step 10', '', ['--step', '--steps']),
    ('train --lr fast', '', ['--lr', 'fast']),
    ('train --lr -1', '', ['lr', '-1']),
    ('train --group-size 1', '', ['--group-size', '1']),
    ('train --batch-positions 0', '', ['--batch-positions', '0']),
    ('train --temperature nan', '', ['--temperature', 'nan']),
    ('train --mix-env-ratio 1.5', '', ['--mix-env-ratio', '1.5']),
    ('train --loss-type ppo', '', ['--loss-type', 'ppo', 'dapo']),
    ('train --kl-estimator kl4', '', ['--kl-estimator', 'kl4', 'kl3']),
    ('train --use-gae true', '', ['--use-gae takes no value', 'true']),
    ('train --steps 2 5', '', ["'5' belongs to no flag"]),
    ('train --baseline-type best', '', ['best', 'group_mean']),
    ('train --reward-shaping cubic', '', ['--reward-shaping', 'cubic', 'graduated']),
    ('train --clip-range -1', '', ['clip', '-1']),
    ('train --model no/such/folder', '', ['no/such/folder']),
    ('train --data no.txt', '', ['no.txt']),
    ('train --data bad.toml', '', ['bad.toml']),
    ('train --output-dir lines.txt', '', ['--output-dir', 'lines.txt']),
    ('train --stockfish-path no/engine', '', ['no/engine']),
    ('train --device tpu', '', ['--device', 'tpu', 'cpu']),
    ('train --max-positions 0', '', ['--max-positions', '0']),
    ('train --eval-policy 1000000', '', ['--eval-policy', '1000000']),
    ('pretrain --steps 0', '', ['steps', '0']),
    ('pretrain --lr fast', '', ['--lr', 'fast']),
    ('pretrain --env-share -.5 --verdict-share .6', '', ['--env-share -0.5', 'at least 0']),
    ('pretrain --env-share .5 --verdict-share .5', '', ['--verdict-share 0.5', 'together below 1']),
    ('train --reference-device cuda:99', '', ['--reference-device cuda:99']), ('train --resume', '', ['--resume', 'no run in runs']),
    ('ablate klx', '', ['klx', 'replays', 'kl']), ('ablate --seeds 0', '', ['seeds 0']), ('ablate --workers 0', '', ['workers 0']),
    ('search --space lr=1 --lr 1e-4', '', ['--lr', 'space']), ('search --space kl_coef=0..1', '', ['--trials']), ('search --workers 0', '', ['--workers 0']),
    ('search --model no/such', '', ['no/such']),
    ('push --to me/chess', '', ['--model is required']), ('push --model nano', '', ['--to is required']), ('push --model nano --to chess', '', ['--to chess', 'owner/name']),
    ('push --model nano --to a/b/c', '', ['a/b/c']), ('push --model nowhere --to me/chess', '', ['--model nowhere', 'folder']),
    ('push --model nano --to a/b --dry-run --revision a..b', '', ['--revision', 'a..b', 'branch']), ('push --model nano --to a/b --dry-run --revision -x/', '', ['--revision']),
    ('push --model me/chess --to me/other', '', ['--model me/chess']),
]


@pytest.mark.parametrize('words, stdin, named', MISTAKES, ids=[f'{i} {row[0]}' for i, row in enumerate(MISTAKES)])
def test_a_mistake_costs_one_line_and_creates_nothing(words, stdin, named, call, cwd, monkeypatch):
    (cwd/'bad.toml').write_text('n = = 3')
    (cwd/'key.toml').write_text('seeds = 3')
    for name in ('run/final_checkpoint', 'empty', 'torn', 'killed/checkpoint-10', 'killed/checkpoint-9', 'begun', 'goneon/final_checkpoint', 'goneon/checkpoint-2', 'goneon/checkpoint-10'): (cwd/name).mkdir(parents=True)
    os.utime(cwd/'goneon/final_checkpoint', (0, 0))    # it was gone on with, and killed
    for name in ('killed/metrics.jsonl', 'begun/metrics.jsonl', 'goneon/metrics.jsonl'): (cwd/name).touch()
    (cwd/'torn'/'config.json').write_text('{')
    (cwd/'utf16.txt').write_text(ROW, encoding='utf-16')
    (cwd/'onlyp.txt').write_text(shipped('train')[0].line)
    (cwd/'table.toml').write_text('[n]\nx = 3')
    (cwd/'twice.toml').write_text('max-new-tokens = 5\nmax_new_tokens = 6')
    (cwd/'train.toml').write_text('[train]\nsteps = 3')
    (cwd/'header.csv').write_text('PuzzleId,FEN,Moves\n')
    (cwd/'value.toml').write_text('n = "many"')
    (cwd/'list.toml').write_text('n = [5]')
    (cwd/'lines.txt').write_text('\n'.join(env_lines(2)))
    (cwd/'packed.csv.zst').write_bytes(b'\x28\xb5\x2f\xfd' + bytes(range(256)))
    (cwd/'false.csv.gz').write_text('PuzzleId,FEN,Moves')
    (cwd/'blank.csv').write_text(f'PuzzleId,FEN,Moves\nx,{START}, ')
    for module in ('suites', 'rules'):
        monkeypatch.setattr(f'rookworld_nb.{module}.find_stockfish', lambda path=None: find_engine(path))
    monkeypatch.setattr('rookworld_nb.setup.shipped', read_once)
    before = sorted(cwd.rglob('*'))
    code, lines, errors = call(*words.split(), stdin=stdin)
    assert code == 2 and lines == []
    message = errors.splitlines()[-1]
    assert len([line for line in errors.splitlines() if 'left out' not in line]) == 1  # data lines are named beside it
    assert message.startswith('rookworld') and all(part in message for part in named), message
    assert len(message) < 400 and sorted(cwd.rglob('*')) == before


def find_engine(path: str | None) -> str:
    """An engine that is always there, unless another one is asked for."""
    return find_stockfish(path) if path else sys.executable


def test_a_flag_of_several_values_may_come_several_times(call):
    _, lines, _ = call('eval', '--suite', 'mate', '--limit', 2, '--suite', 'tactics,env', '--json', '--suite', 'mate')
    told = json.loads(lines[0])
    suites = [row['suite'].partition(',')[0] for row in told['suites']]
    assert suites[0] == 'mate' and {*suites} == {'mate', 'tactics'} and {row['task'] for row in told['metrics']} == {'A'}


def test_words_may_stand_before_and_behind_flags(call, cwd):
    for name in 'ab': (cwd/f'{name}.jsonl').write_text(ROW.replace('}', f', "file": "{name}"}}') + '\n')
    for words in ('a.jsonl --penalty -0.5 b.jsonl', '--penalty -0.5 a.jsonl b.jsonl', 'a.jsonl b.jsonl --penalty=-0.5'):
        code, lines, _ = call('score', *words.split())
        assert code == 0 and [(json.loads(line)['file'], json.loads(line)['reward']) for line in lines] == [('a', -.5), ('b', -.5)]


def test_a_chess_program_may_speak_in_another_encoding(monkeypatch, capsys):
    said = 'uci\nsetoption name EvalFile value C:\\Sch\xe4che\nisready\nquit\n'.encode('latin-1')
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(said), encoding='utf-8'))
    assert main(['uci']) == 0 and capsys.readouterr().out.splitlines()[-2:] == ['uciok', 'readyok']


def test_an_unknown_flag_lists_all_where_none_is_close(call):
    message = call('positions', '--xyzzy')[2]
    assert all(word in message for word in ('--xyzzy', '--n', '--seed', '--config', '--help'))


def test_only_mistakes_of_the_user_are_hidden(call, monkeypatch):
    for error, expected in ((UsageError('bad'), 2), (EngineNotFoundError('none'), 2), (KeyboardInterrupt(), 130),
                            (FileNotFoundError(2, 'No such file', 'x'), 2)):
        monkeypatch.setitem(COMMANDS, 'positions', cli.Command(raiser(error)))
        code, _, errors = call('positions')
        assert code == expected and len(errors.splitlines()) == 1
    for error in (ValueError('ours'), KeyError('ours'), RuntimeError('ours'), OSError('disk'), FirstUpdateError('two forward passes differ'),
                  BatchShapeError('tensors'), MissingInputError('tensors'), SequenceError('rows'), WorkersLostError('all'),
                  FileNotFoundError(2, 'No such file', str(Path(cli.__file__).parent/'assets'/'gone.txt'))):
        monkeypatch.setitem(COMMANDS, 'positions', cli.Command(raiser(error)))
        with pytest.raises(type(error)):
            call('positions')


def test_a_note_about_the_run_is_told_with_the_mistake(call, monkeypatch):
    error = UsageError('bad')
    error.add_note('in the run x')
    monkeypatch.setitem(COMMANDS, 'positions', cli.Command(raiser(error)))
    assert call('positions')[2] == 'rookworld positions: bad; in the run x\n'


@pytest.mark.parametrize('words, code, said', [
    ('score <&-', 2, 'rookworld score: no rows to score: the input is empty\n'), ('positions --n 2 >&-', 0, ''), ('generate --model nope x 2>&-', 2, '')])
def test_a_closed_stream_is_an_empty_one(words, code, said):
    done = subprocess.run(['bash', '-c', f'{SCRIPT} {words}'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (code, '', said)


@pytest.mark.parametrize('name, code, said', [('generate', 2, 'rookworld generate: no prompts: the input is empty\n'), ('uci', 0, '')])
def test_a_stream_that_is_not_there_is_an_empty_one(name, code, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'stdin', None)    # what Python makes of a closed one
    assert main([name]) == code and capsys.readouterr() == ('', said)


@pytest.mark.slow
def test_a_run_needs_no_stream(tmp_path):
    words = f'train --steps 1 --batch-positions 2 --eval-policy 0 --eval-env 0 --output-dir {tmp_path}/run'
    assert subprocess.run(['bash', '-c', f'{SCRIPT} {words} <&- >&- 2>&-'], timeout=120).returncode == 0 and (tmp_path/'run'/'summary.json').exists()


def test_a_letter_that_the_terminal_does_not_know_is_written_as_its_code(monkeypatch):
    said, wrote = io.BytesIO(b'position startpos moves e2\xff4\nisready\n'), io.BytesIO()
    for name, stream in (('stdin', said), ('stdout', wrote)): monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding='ascii'))
    assert main(['uci']) == 0 and all(part in wrote.getvalue() for part in (b'left out', b'\\ufffd', b'readyok')), wrote.getvalue()


def test_a_file_that_the_system_refuses_is_no_traceback(call, tmp_path):
    long, loop = tmp_path/('x'*300), tmp_path/'loop'
    loop.symlink_to(loop)
    assert call('report', str(long))[0] == 2 and call('score', str(loop))[::2] == (2, f'rookworld score: {loop}: Too many levels of symbolic links\n')


def test_a_place_that_cannot_be_written_to_costs_no_examination(call, tmp_path, monkeypatch):
    loop = tmp_path/'loop'
    loop.symlink_to(loop)
    monkeypatch.setattr('rookworld_nb.run.examine', raiser(AssertionError('an examination')))
    code, _, said = call('train', '--output-dir', str(loop), '--steps', '1')
    assert code == 2 and f'--output-dir {loop}: cannot be made' in said


def test_a_full_disk_is_no_traceback():
    done = subprocess.run([sys.executable, '-m', 'rookworld_nb.cli', 'positions', '--n', '3'], stdout=open('/dev/full', 'w'), stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, 'rookworld positions: output: No space left on device\n')


def test_flags_that_a_command_could_do_nothing_with_are_none(call):
    for command, words in {'score': ('reward-warmup-steps', 'normalize-rewards'), 'search': ('resume', 'auto-batch-size')}.items():
        for word in words: assert f'there is no flag --{word}' in call(command, f'--{word}')[2]
    assert 'runs/search' in '\n'.join(call('search', '--help')[1])


def test_a_row_that_nobody_judges_has_no_reward(call, monkeypatch):
    monkeypatch.setattr('rookworld_nb.rewards.judge_rows', lambda engine, cfg, prompts, *others: [None]*len(prompts))
    code, lines, errors = call('score', stdin=ROW)
    assert code == 2 and json.loads(lines[0])['reward'] is None and '1 of 1 rows could not be judged' in errors


def test_score_does_not_wait_for_a_keyboard(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdin, 'isatty', lambda: True, raising=False)
    assert main(['score']) == 2 and 'name files' in capsys.readouterr().err


def raiser(error: BaseException):
    """A command that fails."""
    def command():
        "Fail."
        raise error
    return command


# ---- the installed command

def test_help_needs_no_torch():
    program = "import sys; from rookworld_nb.cli import main; main(['--help']); main(['positions', '--help']); main(['x'])\n" \
              "print({'torch', 'pandas', 'matplotlib', 'chess'} & set(sys.modules))"
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == 'set()', done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_the_script_passes_the_exit_code_on(tmp_path):
    done = subprocess.run([SCRIPT, 'trian'], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, '', 1)
    done = subprocess.run([SCRIPT, '--version'], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith('rookworld_nb ')


def test_a_prompt_is_asked_as_it_was_trained(call, tiny):
    words = ['generate', '--model', tiny, '--max-new-tokens', '4']
    for liberties, plain in ((f'P:{START}  ', f'P: {START}'), (f'A:{START}+e2e4+e2e4+', f'A: {START}+e2e4+e2e4+'), (f'{START}+e2e4+e2e4+', f'A: {START}+e2e4+e2e4+')):
        answer = call(*words, plain)
        assert call(*words, liberties) == answer and answer[0] == 0


def test_the_newest_run_is_reported(call, tiny, cwd):
    assert call('train', '--model', tiny, '--output-dir', 'runs/one', *SMALL)[0] == 0
    shutil.copytree('runs/one', 'runs/two')
    os.utime('runs/one/metrics.jsonl')
    for name, file in (('pretraining', 'metrics.jsonl'), ('not begun', 'config.json')):    # neither is a run
        (cwd/'runs'/name).mkdir()
        (cwd/'runs'/name/file).write_text('{}\n')
    code, lines, _ = call('report')
    assert code == 0 and lines == [str(Path('runs/one/report.html'))] and Path(lines[0]).stat().st_size > 10_000
    assert call('report', 'nothing')[0] == 2


@pytest.mark.parametrize('words', [['score'], ['generate']])
def test_bytes_that_are_no_text_are_a_mistake(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'P: caf\xe9\n'), encoding='utf-8'))
    assert main(words) == 2 and (said := capsys.readouterr().err).count('\n') == 1 and 'standard input: not UTF-8' in said


def test_a_negative_number_may_have_an_exponent(call):
    assert call('score', '--penalty', '-3e-1', stdin=ROW)[1] == call('score', '--penalty', '-.3', stdin=ROW)[1] != []


def test_a_reader_may_leave_early():
    done = subprocess.run(['bash', '-c', f'{SCRIPT} positions --n 300 | head -n 1; exit ${{PIPESTATUS[0]}}'], capture_output=True, text=True, timeout=120)
    assert len(done.stdout.splitlines()) == 1 and done.stderr == '' and done.returncode == 0


@pytest.mark.slow
def test_a_run_whose_reader_leaves_does_not_end_as_if_it_were_done(tmp_path, lines):
    words = f'train --steps 3 --batch-positions 2 --group-size 2 --max-new-tokens 8 --eval-policy 0 --eval-env 0 --data {lines} --output-dir {tmp_path}/run'
    buffered = {name: value for name, value in os.environ.items() if name != 'PYTHONUNBUFFERED'}    # as everybody else's Python is
    done = subprocess.run(['bash', '-c', f'{SCRIPT} {words} | head -n 1; exit ${{PIPESTATUS[0]}}'], capture_output=True, text=True, timeout=120, env=buffered)
    assert done.returncode == 130 and 'nobody reads its output any more' in done.stderr.splitlines()[-1]


# ---- positions, generate, score

def test_positions_are_a_function_of_the_seed(call):
    first, again, other = (call('positions', '--n', '20', '--seed', seed)[1] for seed in (1, 1, 2))
    assert first == again != other
    phases = [json.loads(line)['phase'] for line in first]
    assert phases == ['opening']*4 + ['middlegame']*12 + ['endgame']*4


PUSHED = 'rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1'    # nobody can take


def test_a_position_is_asked_in_the_spelling_that_a_model_knows(call, tiny):
    told = [json.loads(line)['prompt'] for line in call('generate', '--model', tiny, '--max-new-tokens', '2', '--json', f'P: {PUSHED}', f'{PUSHED}+e7e5+e7e5+')[1]]
    assert told == [f'P: {PUSHED.replace("e3", "-")}', f'A: {PUSHED.replace("e3", "-")}+e7e5+e7e5+']


def test_eval_shows_a_model_the_moves_that_it_is_used_to(call, tiny, cwd, monkeypatch):
    fen, played = START, []
    for uci in ('e2e4', 'e7e5', 'g1f3'):
        line, fen = format_env(fen, uci, [*played, uci], *env_step(fen, uci)), env_step(fen, uci).new_fen
        played.append(uci)
    (cwd/'lines.txt').write_text(line)
    asked, examine = [], evaluate_module.evaluate
    monkeypatch.setattr(evaluate_module, 'evaluate', lambda model, tokenizer, samples, *given, **named: (
        asked.append(samples[0].prompt.split('+')[2]), examine(model, tokenizer, samples, *given, **named))[1])
    for small, given in ((SMALL_MODEL, ()), (0, ()), (0, ('--history-plies', 2))):
        monkeypatch.setattr('rookworld_nb.config.SMALL', small)
        assert call('eval', '--model', tiny, '--suite', 'env', '--data', 'lines.txt', *given)[0] == 0
    assert asked == ['g1f3', 'e2e4 e7e5 g1f3', 'e7e5 g1f3'] and call('eval', '--suite', 'env', '--history-plies', 0)[0] == 2


def test_a_writer_that_is_not_installed_is_said_before_there_is_a_folder(call, cwd, monkeypatch):
    monkeypatch.setitem(sys.modules, 'wandb', None)
    code, _, said = call('train', '--wandb', 'chess', '--steps', 1, '--output-dir', 'run')
    assert code == 2 and "pip install 'rookworld_nb[wandb]'" in said and not any(cwd.iterdir())


def test_generate_keeps_the_order_whatever_the_batch(call, tiny):
    prompts = [line.rsplit('+', 4)[0] + '+' for line in env_lines(5)] + [f'P: {START}']
    words = ['generate', '--model', tiny, '--max-new-tokens', '6', '--json']
    rows = [json.loads(line) for line in call(*words, '--batch-size', '2', stdin='\n'.join(prompts))[1]]
    assert [row['prompt'] for row in rows] == prompts
    together = [json.loads(line) for line in call(*words, *prompts)[1]]
    assert [row['completion'] for row in rows] == [row['completion'] for row in together]
    for row in rows:
        assert row['logprob'] == pytest.approx(sum(row['logprobs'])) and 1 <= len(row['logprobs']) <= 6
        assert max(row['logprobs']) < 0 and '<|endoftext|>' not in row['completion']


def test_generate_samples_groups_with_a_seed(call, tiny):
    words = ['generate', '--model', tiny, '--max-new-tokens', '4', '--group-size', '3', '--temperature', '1', f'P: {START}',
             env_prompt(START, 'e2e4')]
    first, again, other = (call(*words, '--seed', seed)[1] for seed in (0, 0, 1))
    assert first == again != other and len(first) == 6
    assert all(f'P: {START}' in line for line in first[:3]) and all('A: ' in line for line in first[3:])


def test_score_keeps_rows_order_and_extra_keys(call):
    rng = random.Random(0)
    rows = [{'prompt': line.rsplit('+', 4)[0] + '+', 'completion': line.split('+', 3)[3][:rng.randint(0, 80)], 'id': i}
            for i, line in enumerate(env_lines(60))]
    rows += [{'prompt': f'P: {START}', 'completion': POLICY[:rng.randint(0, 70)], 'target': POLICY, 'id': 60 + i} for i in range(40)]
    rng.shuffle(rows)
    code, lines, _ = call('score', stdin='\n'.join(map(json.dumps, rows)))
    scored = [json.loads(line) for line in lines]
    assert code == 0 and [{k: v for k, v in row.items() if k not in ('reward', 'components')} for row in scored] == rows
    expected = RewardScorer()([r['prompt'] for r in rows], [r['completion'] for r in rows], [r.get('target') for r in rows])
    assert [row['reward'] for row in scored] == pytest.approx(expected.rewards.tolist(), abs=1e-6)
    assert {row['components']['task'] for row in scored} == {'P', 'A'}
    assert all(set(row['components']) == {'task', 'format', *parts, 'raw'} for row in scored
               for parts in [('candidates', 'evals', 'best', 'legal_fraction') if row['prompt'][0] == 'P' else ('fen', 'flags', 'reward_value')])


def test_score_reads_files_and_settings(call, cwd):
    (cwd/'rows.jsonl').write_text(ROW + '\n\n' + ROW + '\n')
    rewards = [json.loads(line)['reward'] for line in call('score', 'rows.jsonl', '--penalty', '-0.5')[1]]
    assert rewards == [-.5, -.5]


@pytest.mark.parametrize('row, words', [
    ({'prompt': 'P: 8/8/8/8 w - - 0 1', 'completion': ''}, ['line 2', '8/8/8/8']),
    ({'prompt': f'P: {START}', 'completion': '', 'target': 'M: e2e5 E: 0.1 B: e2e5'}, ['line 2', 'e2e5']),
    ({'prompt': 'Q: ?', 'completion': ''}, ['line 2', 'Q: ?'])])
def test_score_asks_no_engine_before_every_row_is_good(row, words, call, cwd, monkeypatch):
    monkeypatch.setattr('rookworld_nb.rules.Stockfish.analyse', lambda *given: pytest.fail('asked in vain'))
    code, lines, errors = call('score', '--engine', stdin='\n'.join(json.dumps(each) for each in ({'prompt': f'P: {START}', 'completion': ''}, row)))
    assert code == 2 and not lines and all(word in errors for word in words)


# ---- label

class Engines:
    """Stands in for a pool of engines: the first five legal moves, each a pawn worse."""
    asked, engines = 0, [SimpleNamespace(name='Engines')]

    def __init__(self, workers: int, **options) -> None:
        self.options = options

    def __enter__(self):
        return self

    def __exit__(self, *failure) -> None:
        pass

    def analyse_many(self, fens: list[str]) -> list[tuple[Candidate, ...]]:
        """Answer without thinking."""
        Engines.asked += len(fens)
        return [tuple(Candidate(uci, 1. - i) for i, uci in enumerate(sorted(legal_moves(fen))[:5])) for fen in fens]


@pytest.fixture
def fens(monkeypatch) -> list[str]:
    """Forty positions, and engines that cost nothing."""
    monkeypatch.setattr('rookworld_nb.rules.StockfishPool', Engines)
    monkeypatch.setattr(Engines, 'asked', 0)
    return [line.split('+')[0][3:] for line in env_lines(40)]


def test_label_writes_lines_in_order(call, fens):
    code, lines, _ = call('label', *fens)
    assert code == 0 and [line[3:].split('M:')[0].strip() for line in lines] == fens
    assert any(line.split('M: ')[1][:4] != line.split('B: ')[1][:4] for line in lines), 'the moves are in engine order'
    assert all(line.endswith(f'B: {min(legal_moves(fen))}') for line, fen in zip(lines, fens))
    assert call('label', '--no-padded', fens[0])[1][0].count('  ') == 0
    assert call('label', *fens)[1] == lines != call('label', '--seed', '1', *fens)[1]


def test_any_text_is_scored_and_means_the_same_from_a_file(call, cwd):
    rows = [{'prompt': env_prompt(START, 'e2e4'), 'completion': text} for text in ('\ud800', 'two\u2028lines', 'grüße')]
    text = '\n'.join(json.dumps(row, ensure_ascii=index == 0) for index, row in enumerate(rows))
    (cwd/'rows.jsonl').write_text(text, encoding='utf-8')
    code, lines, _ = call('score', 'rows.jsonl')
    assert code == 0 and len(lines) == 3 and call('score', stdin=text)[1] == lines


def test_a_byte_order_mark_is_no_part_of_the_text(call, cwd):
    (cwd/'rows.jsonl').write_text(ROW, encoding='utf-8-sig')
    (cwd/'settings.toml').write_text('n = 2', encoding='utf-8-sig')
    assert call('score', 'rows.jsonl')[1] == call('score', stdin=ROW)[1]
    assert len(call('positions', '--config', 'settings.toml')[1]) == 2
    (cwd/'lines.txt').write_text(shipped('train')[0].line, encoding='utf-8-sig')
    assert read_lines(cwd/'lines.txt') == ([shipped('train')[0]], [])


@pytest.mark.parametrize('torn', [0, 1, 20, 100, 150])
def test_label_resumes_after_a_torn_line(torn, call, fens, cwd):
    text = '\n'.join(fens)
    assert call('label', '--output', 'all.txt', stdin=text)[0] == 0
    whole = (cwd/'all.txt').read_bytes()
    lines = whole.splitlines(keepends=True)
    (cwd/'half.txt').write_bytes(b''.join(lines[:17]) + lines[17][:torn])
    Engines.asked = 0
    assert call('label', '--output', 'half.txt', '--workers', '3', stdin=text)[0] == 0
    assert (cwd/'half.txt').read_bytes() == whole and Engines.asked == 23
    assert call('label', '--output', 'half.txt', stdin=text)[0] == 0
    assert (cwd/'half.txt').read_bytes() == whole


@pytest.mark.parametrize('last', ['P: 7k/8/8/8/8/8/6q1/7K w - - 0 1 M: h1g2 E: 0.0 B: h1g2', 'P: remember the milk'])
def test_label_throws_nothing_of_others_away(last, call, fens, cwd):
    whole = call('label', chess.STARTING_FEN)[1][0] + '\n'
    (cwd/'kept.txt').write_text(whole + last)
    code, _, errors = call('label', chess.STARTING_FEN, '--output', 'kept.txt')
    assert (cwd/'kept.txt').read_text().rstrip('\n') == whole + last
    assert code == 0 if 'M:' in last else code == 2 and 'kept.txt, line 2: not a P: line' in errors


def test_label_names_the_place_of_a_bad_position(call, fens):
    said = "'foo' is not a six-field FEN with 8 ranks of 8 squares\n"
    assert call('label', stdin='\n'.join([fens[0], '', fens[0], ' ', 'foo']))[::2] == (2, f'rookworld label: standard input, line 5: {said}')
    assert call('label', fens[0], fens[0], 'foo')[::2] == (2, f'rookworld label: position 3: {said}')


def test_label_takes_prompts(call, fens):
    lines = call('label', *fens[:3])[1]
    assert call('label', *(f'P: {fen}' for fen in fens[:3]))[1] == lines == call('label', stdin=''.join(f'P: {fen}\n\n' for fen in fens[:3]))[1]


def test_label_says_how_a_file_goes_in(call, fens, cwd):
    (cwd/'fens.txt').write_text('\n'.join(fens))
    hint = 'a file of positions goes in with `< fens.txt`, or with `--input fens.txt --output FILE`'
    code, lines, errors = call('label', 'fens.txt')
    assert code == 2 and not lines and hint in errors and 'a file of positions goes in' not in call('label', 'other.txt')[2]


def test_label_spells_a_position_in_one_way(call, fens, cwd):
    board = chess.Board()
    board.push_uci('e2e4')
    fen, (*fields, _, halfmoves, number) = board.fen(), board.fen().split()
    spelt = [' '.join((*fields, square, halfmoves, number)) for square in ('-', 'e3')]
    assert spelt[0] == fen and call('label', *spelt, '--output', 'one.txt')[0] == 0
    assert [line[3:].partition('M:')[0].strip() for line in (cwd/'one.txt').read_text().splitlines()] == [fen]


def test_label_keeps_a_whole_last_line_without_a_line_feed(call, fens, cwd):
    assert call('label', '--output', 'all.txt', stdin='\n'.join(fens))[0] == 0
    whole = (cwd/'all.txt').read_bytes()
    (cwd/'edited.txt').write_bytes(b''.join(whole.splitlines(keepends=True)[:17])[:-1])
    Engines.asked = 0
    assert call('label', '--output', 'edited.txt', stdin='\n'.join(fens))[0] == 0
    assert (cwd/'edited.txt').read_bytes() == whole and Engines.asked == 23


def test_two_commands_do_not_add_to_one_file(call, fens, cwd):
    with locked(cwd/'out.txt'):
        code, _, errors = call('label', '--output', 'out.txt', *fens)
    assert code == 2 and 'out.txt' in errors and 'another command' in errors and not (cwd/'out.txt').read_bytes()


@pytest.mark.parametrize('text, line', [('shopping list\n', 1), ('shopping list', 1), ('P: a\nbook and its last line', 1), ('\n', 1)])
def test_label_leaves_foreign_files_alone(text, line, call, fens, cwd):
    (cwd/'notes.txt').write_text(text)
    code, _, errors = call('label', '--output', 'notes.txt', fens[0])
    assert code == 2 and 'notes.txt' in errors and f'line {line}' in errors
    assert (cwd/'notes.txt').read_text() == text


def test_label_skips_positions_without_a_choice(call, fens):
    mate, forced = 'R5k1/5ppp/8/8/8/8/8/6K1 b - - 0 1', '7k/8/8/8/8/8/1q6/K7 w - - 0 1'
    code, lines, errors = call('label', mate, fens[0], forced, fens[0])
    assert code == 0 and len(lines) == 1 and '2 positions' in errors


def test_label_reads_what_positions_writes(call, fens):
    lines = call('positions', '--n', '3')[1]
    assert call('label', stdin='\n'.join(lines))[1] == call('label', *(json.loads(line)['fen'] for line in lines))[1] != []
    assert 'position 1' in call('label', '{"board": "x"}')[2]


def test_label_says_what_it_leaves_as_it_is(call, fens, cwd):
    assert 'already' not in call('label', '--output', 'some.txt', *fens[:2])[2]
    assert '2 of 3 positions are in some.txt already' in call('label', '--output', 'some.txt', *fens[:3])[2]


@pytest.mark.stockfish
def test_label_asks_the_real_engine(call, cwd):
    mate_in_one = '6k1/5ppp/8/8/8/8/8/R5K1 w - - 0 1'
    code, lines, _ = call('label', START, mate_in_one, '--workers', '2', '--nodes', '500')
    assert code == 0 and lines[1].endswith('B: a1a8') and '999.99' in lines[1]
    assert set(lines[0].split('M: ')[1].split(' E:')[0].split()) <= legal_moves(START)


# ---- eval

def test_eval_measures_both_tasks(call, tiny, cwd):
    (cwd/'lines.txt').write_text('\n'.join([*env_lines(6), f'P: {START}{POLICY}', 'nonsense']))
    words = ['eval', '--model', tiny, '--data', 'lines.txt', '--max-new-tokens', '8']
    code, lines, errors = call(*words, '--json', '--temperature', '0,0.7')
    report = json.loads(lines[0])
    assert code == 0 and len(lines) == 1 and 'line 8' in errors and 'batch' not in errors    # a bar is for terminals
    assert {(row['task'], row['temperature']) for row in report['metrics']} == {(t, x) for t in 'PA' for x in (0., .7)}
    assert {row['n'] for row in report['metrics'] if row['task'] == 'A'} == {6}
    assert all(row['low'] <= row['mean'] <= row['high'] for row in report['metrics'] if 'low' in row)
    assert all('low' in row for row in report['metrics'] if TASK_METRICS[row['task']][row['metric']].unit == 'share')    # others may not vary
    assert report['recall'][0]['class'] == 'ordinary'
    text = '\n'.join(call(*words, '--suite', 'env', '--limit', '2')[1])
    assert 'state_exact' in text and '2 prompts' in text and 'best_legal' not in text


@pytest.mark.parametrize('limit', [5, 351, 699, 700, 9999])
def test_a_limit_of_the_rare_moves_is_kept_and_takes_from_everywhere(limit):
    whole = shipped('stress')
    chosen = evaluation_samples(None, ('stress',), limit)
    places = [whole.index(sample) for sample in chosen]
    gaps = [b - a for a, b in zip(places, places[1:])]
    assert len(chosen) == min(limit, len(whole)) and max(gaps) - min(gaps) <= 1 and places[-1] >= len(whole) - max(gaps) - 1


def test_eval_examines_rare_moves(call, cwd):
    code, lines, _ = call('eval', '--suite', 'stress', '--limit', '5', '--json')
    report = json.loads(lines[0])
    assert code == 0 and {row['task'] for row in report['metrics']} == {'A'} and sum(row['n'] for row in report['recall']) == 5
    assert {row['class'] for row in report['recall']} > {'illegal'}    # the file is sorted by kind


def test_eval_compares_two_models(call, tiny, cwd):
    words = ['eval', '--limit', '3', '--temperature', '0,1']
    report = json.loads(call(*words, '--against', tiny, '--json')[1][0])
    expected = compare(*map(evaluated, (tiny, 'nano'))).reset_index()
    assert len(report['comparison']) == len(expected) and max(row['n'] for row in report['comparison']) == 3
    for row, want in zip(report['comparison'], expected.to_dict('records')):
        told = {name: value for name, value in want.items() if isinstance(value, str) or math.isfinite(value)}
        assert {name: row[name] for name in row if name != 'chance'} == pytest.approx(told)
    assert expected['difference'].abs().max() > .1
    alone = json.loads(call(*words, '--json')[1][0])
    assert alone['metrics'] == report['metrics'] and alone['recall'] == report['recall'] != report['recall_before'] and 'comparison' not in alone


def test_each_of_two_models_is_shown_as_many_moves_as_it_is_used_to(call, tiny, cwd, monkeypatch):
    line = '8/8/8/8/8/k7/1r6/7K w - - 35 41+h1g1+b1b2 h1g1+8/8/8/8/8/k7/1r6/6K1 b - - 36 41+0.001+0+0'
    (cwd/'own.txt').write_text(f'A: {line}\n'*2)
    sizes, asked = iter([1, 10**9]), []
    monkeypatch.setattr('rookworld_nb.model.num_parameters', lambda model: next(sizes))
    monkeypatch.setattr('rookworld_nb.evaluate.evaluate', lambda *given, **options: asked.append(given[2][0].prompt) or evaluate(*given, **options))
    assert call('eval', '--data', 'own.txt', '--suite', 'env', '--model', 'nano', '--against', tiny)[0] == 0
    assert [prompt.split('+')[2] for prompt in asked] == ['h1g1', 'b1b2 h1g1']


def evaluated(model):
    """The completions that the command above looks at."""
    samples, policy = evaluation_samples(None, ('policy', 'env'), 3), load_pretrained(model)
    scorer = RewardScorer(TrainConfig().rewards)
    return pd.concat(evaluate(*policy, samples, t, scorer=scorer) for t in (0., 1.))


def suite_values(lines):
    rows = json.loads(lines[0])['suites']
    return {(row['suite'], row['temperature'], row['metric']): row for row in rows}


def test_eval_solves_puzzles(call, cwd):
    words = ['eval', '--suite', 'mate', '--limit', '9', '--json']
    code, lines, _ = call(*words, '--temperature', '0,1', '--samples-per-prompt', '4')
    report, found = json.loads(lines[0]), suite_values(lines)
    assert code == 0 and len(lines) == 1 and report['metrics'] == report['recall'] == []
    assert {key[1:] for key in found} == {(0., 'solved'), (0., 'legal'), *((1., m) for m in ('solved', 'legal', 'pass@2', 'pass@4'))}
    assert all(row['n'] == 9 and 0 <= row['low'] <= row['mean'] <= row['high'] <= 1 for row in found.values())
    code, lines, _ = call('eval', '--suite', 'mate,tactics', '--limit', '3', '--json')
    assert code == 0 and [suite_values(lines)[name, 0., 'solved']['n'] for name in ('mate', 'tactics')] == [3, 3]
    (cwd/'mine.epd').write_text('6k1/5ppp/8/8/8/8/8/R5K1 w - - bm Ra8#; id "one";\n')
    code, lines, said = call('eval', '--suite', 'puzzles', '--data', 'mine.epd', '--json')
    assert code == 0 and 'malformed' not in said  # it is no file of P: and A: lines
    assert suite_values(lines)['puzzles', 0., 'solved']['n'] == 1
    assert 'solved' in '\n'.join(call(*words[:-1])[1])


def test_games_begin_where_no_other_game_passes():
    openings = [name for name, line in OPENINGS.items() if not any(other.startswith(f'{line} '.lstrip()) for other in OPENINGS.values() if other != line)]
    named = {position.fen: position.name for position in opening_positions()}
    starts = [named[fen] for fen in cli.suite_openings(('selfplay',), 106, (), None)]
    assert starts[:len(openings)] == openings and len(openings) > 20 and len({*starts}) == 106


def test_eval_says_what_is_known_before_it_is_interrupted(call, cwd, monkeypatch):
    def interrupt(*given): raise KeyboardInterrupt
    monkeypatch.setattr('rookworld_nb.suites.self_play', interrupt)
    code, lines, errors = call('eval', '--suite', 'mate,selfplay', '--limit', '3', '--games', '2')
    assert code == 130 and lines[1] == 'mate, at temperature 0' and lines[3].startswith('solved') and 'interrupted' in errors


@pytest.mark.parametrize('words', [('eval', '--limit', '2'), ('generate', 'P: ' + START)])
def test_memory_that_runs_out_is_said_with_what_takes_less(call, cwd, monkeypatch, words):
    def fail(*given): raise error
    monkeypatch.setattr(GPT, 'prefill', fail)
    error = RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory:\nError code 12 (Cannot allocate memory)")
    code, _, errors = call(*words)
    assert code == 2 and 'memory ran out (' in errors and 'a smaller --batch-size takes less' in errors and len(errors.splitlines()) == 1
    error = RuntimeError('ours')
    with pytest.raises(RuntimeError, match='^ours$'): call(*words)


def test_eval_says_which_task_the_data_lacks(call, tiny, cwd):
    (cwd/'lines.txt').write_text('\n'.join(env_lines(2)))
    code, lines, errors = call('eval', '--model', tiny, '--data', 'lines.txt', '--max-new-tokens', '8')
    assert code == 0 and 'lines.txt: holds no P: line' in errors and any(line.startswith('A: means') for line in lines)
    assert 'holds no' not in call('eval', '--model', tiny, '--data', 'lines.txt', '--suite', 'env', '--max-new-tokens', '8')[2]


def test_eval_plays_with_itself(call, cwd):
    code, lines, _ = call('eval', '--suite', 'selfplay', '--games', '2', '--temperature', '1', '--json')    # short games
    found = suite_values(lines)
    assert code == 0 and {*found} == {(f'selfplay, {world}', 1., metric) for world in ('own world', 'rules') for metric in ('legal', 'exact')}
    assert all(row['n'] == 2 for row in found.values()) and found['selfplay, rules', 1., 'legal']['mean'] > 0


def test_eval_names_levels_that_nobody_plays(call, cwd):
    code, lines, errors = call('eval', '--suite', 'policy,selfplay', '--levels', 'skill=3')
    assert (code, lines) == (2, []) and all(word in errors for word in ('--levels skill=3', 'policy,selfplay', 'stockfish'))


@pytest.mark.slow
@pytest.mark.stockfish
def test_eval_plays_matches(call, cwd):
    for level in ('skill=x', 'skill=21', 'nodes=00', 'elo=1', 'nodes=1,nodes=1'):
        code, lines, errors = call('eval', '--suite', 'policy,stockfish', '--levels', level)
        assert (code, lines, len(errors.splitlines())) == (2, [], 1) and level in errors
    code, lines, _ = call('eval', '--suite', 'stockfish', '--games', '2', '--levels', 'nodes=1', '--json')
    found = suite_values(lines)
    assert code == 0 and found['stockfish nodes=1', 0., 'games']['value'] == 2 and isinstance(found['stockfish nodes=1', 0., 'elo']['value'], str)


# ---- train

SMALL = ['--batch-positions', 2, '--group-size', 2, '--max-new-tokens', 4, '--eval-policy', 2, '--eval-env', 2, '--steps', 2]


def test_train_plans_without_a_trace(call, tiny, cwd):
    code, lines, errors = call('train', '--model', tiny, '--plan', *SMALL)
    assert (code, errors, len(lines)) == (0, '', 1) and '2 updates' in lines[0] and list(cwd.iterdir()) == []


@pytest.mark.stockfish
def test_a_plan_ends_the_engine_that_it_asked_about(call, tiny, cwd, monkeypatch):
    ended, close = [], Run.close
    monkeypatch.setattr(Run, 'close', lambda run: (ended.append(run.engine), close(run)))
    assert call('train', '--model', tiny, '--plan', '--stockfish-path', find_stockfish(), *SMALL)[0] == 0 and ended and ended[-1] is not None


def test_processes_that_go_on_with_a_run_meet_as_it_says(call, tiny, cwd, monkeypatch):
    met = []

    @contextmanager
    def meet(*given):
        met.append(given)
        yield ALONE
    monkeypatch.setattr('rookworld_nb.ranks.torchrun', meet)
    assert call('train', '--model', tiny, '--output-dir', 'run', '--rank-timeout', 77, '--device', 'cpu', *SMALL)[0] == 0
    assert call('train', '--resume', '--output-dir', 'run', '--plan')[0] == 0
    assert call('train', '--resume', '--output-dir', 'run', '--plan', '--rank-timeout', 9)[0] == 0
    assert met == [(77., 'cpu'), (77., 'cpu'), (9., 'cpu')]
    assert call('train', '--resume', '--output-dir', 'run', '--lr', 1)[0] == 2 and len(met) == 4    # said by whoever has met


def test_a_preset_is_where_flags_start_from(call, tiny, cwd):
    assert '14 updates' in call('train', '--preset', 'emergency', '--model', tiny, '--plan', *SMALL[:-1], 14)[1][0]
    assert call('train', '--preset', 'emergency', '--model', tiny, '--output-dir', 'run', *SMALL)[0] == 0
    config, usual = json.loads((cwd/'run'/'config.json').read_text()), TrainConfig().for_size(1)
    assert config['lr'] == PRESETS['emergency'](model=tiny).lr and config['kl_coef'] == 5*usual.kl_coef and config['group_size'] == 2
    assert get_args(flags_of(cli.train)['preset'].kind) == tuple(PRESETS)
    code, _, said = call('train', '--preset', 'emergency', '--config', 'run/config.json', '--plan')
    assert code == 2 and '--preset emergency: of no use, since all it sets is given' in said
    assert call('train', '--preset', 'rtx4090', '--model', tiny, '--device', 'cpu', '--micro-batch-size', 12, '--plan')[0] == 0    # of no use to nano's groups
    assert call('train', '--preset', 'emergency', '--output-dir', 'run', '--resume') == (2, [], 'rookworld train: --preset emergency: not with --resume, which goes on with the settings of the run\n')


def test_train_writes_a_run_that_eval_reads(call, tiny, cwd):
    assert call('train', '--model', tiny, '--output-dir', 'run', '--seed', 3, *SMALL)[0] == 0
    rows = [json.loads(line) for line in (cwd/'run'/'metrics.jsonl').read_text().splitlines()]
    config = json.loads((cwd/'run'/'config.json').read_text())
    assert [row['step'] for row in rows] == [1, 2] and (config['seed'], config['group_size']) == (3, 2)
    code, lines, _ = call('eval', '--model', 'run/final_checkpoint', '--limit', 2, '--max-new-tokens', 4, '--json')
    assert code == 0 and json.loads(lines[0])['metrics']
    code, lines, errors = call('train', '--model', tiny, '--output-dir', 'run', *SMALL)
    assert code == 2 and 'run' in errors and len(errors.splitlines()) == 1


def test_a_home_folder_is_found_behind_an_equals_sign(call, tmp_path, monkeypatch):
    "The shell leaves `--flag=~/x` as it is."
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path/'settings.toml').write_text('steps = 7\n')
    (tmp_path/'fens.txt').write_text(START + '\n')
    code, lines, _ = call('train', '--plan', '--config=~/settings.toml', f'--output-dir={tmp_path/"run"}')
    assert code == 0 and any('7' in line for line in lines)
    assert data_files('~/fens.txt') == [tmp_path/'fens.txt'] and len(read_excluded('~/fens.txt')) == 1
    code, _, said = call('push', '--model=~/nothing', '--to', 'a/b', '--dry-run')
    assert code == 2 and 'no such folder' in said
    (tmp_path/'model').mkdir()
    code, _, said = call('push', '--model=~/model', '--to', 'a/b', '--dry-run')
    assert code == 2 and 'no config.json' in said
    code, _, said = call('generate', '--model=~nobody-of-this-name/m', PROMPT)
    assert code == 2 and '~nobody-of-this-name/m' in said


def test_a_byte_order_mark_on_standard_input_is_ignored(call):
    assert call('score', stdin='\ufeff' + ROW)[:2] == call('score', stdin=ROW)[:2]
    assert call('score', stdin=ROW)[0] == 0


def test_a_labelled_file_with_a_bad_byte_is_refused(call, tmp_path):
    path = tmp_path/'out.txt'
    path.write_bytes(f'P: {START} M: e2e4 E: 0.3 B: e2e4\n'.encode() + f'P: {START} M: d2d4 E: 0.3 B: d2d4'.encode() + b'\xff\n')
    code, _, said = call('label', START, '--output', path)
    assert code == 2 and 'out.txt, line 2: not a P: line' in said and 'Traceback' not in said


def test_an_engine_in_the_current_folder_is_found(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'engine').write_text('#!/bin/sh\n')
    (tmp_path/'engine').chmod(0o755)
    code, _, said = call('label', START, '--stockfish-path', './engine')
    assert code == 2 and './engine failed twice' in said    # it ran, and is no engine


# ---- label: engines that fail

class Failing(Engines):
    """Engines that die on some positions."""
    bad: frozenset = frozenset()

    def analyse_many(self, fens: list[str]) -> list[tuple[Candidate, ...]]:
        if self.bad & {*fens}: raise EngineError('it died')
        return super().analyse_many(fens)

    def analyse(self, fen: str) -> tuple[Candidate, ...]:
        return self.analyse_many([fen])[0]


@pytest.mark.parametrize('places', [(0, 1), (16,), (3, 39)])
def test_label_leaves_out_what_the_engine_fails_on_wherever_it_stands(places, call, fens, cwd, monkeypatch):
    monkeypatch.setattr('rookworld_nb.rules.StockfishPool', Failing)
    monkeypatch.setattr(Failing, 'bad', frozenset(fens[place] for place in places))
    for _ in range(2):    # and again, with nothing else left
        code, _, errors = call('label', '--output', 'out.txt', *fens)
        assert code == 0 and errors.count('left out: it died') == len(places)
    assert len((cwd/'out.txt').read_text().splitlines()) == len(set(fens)) - len(places)


@pytest.mark.parametrize('count', [1, 3, 40])
def test_label_ends_where_the_engine_answers_nothing(count, call, fens, cwd, monkeypatch):
    monkeypatch.setattr('rookworld_nb.rules.StockfishPool', Failing)
    monkeypatch.setattr(Failing, 'bad', frozenset(fens))
    code, _, errors = call('label', '--output', 'out.txt', *fens[:count])
    assert code == 2 and 'it died' in errors.splitlines()[-1] and errors.count('left out') == min(count, PATIENCE) - 1


def test_label_finds_out_first_whether_there_is_an_engine(call, fens, cwd, monkeypatch):
    class Silent(Engines):
        @property
        def engines(self): raise EngineError('it does not answer')
    monkeypatch.setattr('rookworld_nb.rules.StockfishPool', Silent)
    code, _, errors = call('label', '--output', 'out.txt', *fens)
    assert code == 2 and 'it does not answer' in errors and not (cwd/'out.txt').exists() and Engines.asked == 0
