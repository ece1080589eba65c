"""Flags: what a signature says, and values on their way through words, files and back."""
import dataclasses
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import pytest

from rookworld_nb import cli
from rookworld_nb.config import PRESETS, TrainConfig, repeated_settings
from rookworld_nb.flags import UsageError, as_text, flags_of, parse_value, parser_of, read_settings, words_of

SETTINGS = flags_of(TrainConfig)
PARSER = parser_of('train', '', SETTINGS)


def read(*words): return read_settings(PARSER, SETTINGS, words)


@dataclasses.dataclass(frozen=True)
class Parent:
    first: int = 1  # of the parent


@dataclasses.dataclass(frozen=True)
class Child(Parent):
    second: tuple[int, ...] = (1, 2)  # of the child


def test_inherited_fields_keep_their_comments():
    assert [flag.help for flag in flags_of(Child).values()] == ['of the parent', 'of the child']


def test_values_survive_the_way_through_text():
    for kind, value in ((int, -3), (float, 1e-5), (float, float('inf')), (bool, False), (Path | None, None), (Path, Path('a b')),
                        (tuple[float, ...], (0., .7)), (Literal['a', 'b'], 'b'), (int | None, 4), (tuple[str, ...], ('a', 'b'))):
        assert parse_value(kind, as_text(value)) == value


@pytest.mark.parametrize('kind, text', [(int, '1.0'), (int, ''), (float, 'nan'), (float, '1,5'), (bool, 'True'), (bool, '1'),
                                        (Literal[1, 2], '3'), (tuple[int, ...], '1,x'), (tuple[str, ...], ' ,'), (float | None, 'null'), (Path, '')])
def test_wrong_values_are_refused(kind, text):
    with pytest.raises(UsageError):
        parse_value(kind, text)


@pytest.mark.parametrize('preset', PRESETS)
def test_a_configuration_survives_the_command_line(preset):
    values = asdict(PRESETS[preset]()) | {'penalty': -.5, 'bf16': True, 'cuda_graphs': False, 'output_dir': 'a folder', 'data': '-x'}
    assert read(*words_of(values)) == values


def test_the_configuration_of_a_run_is_a_file_of_settings(tmp_path):
    own = repeated_settings(TrainConfig(steps=7, lr=1e-4, bf16=True, data='my lines.txt').for_size(1))
    path = tmp_path/'config.json'
    path.write_text(json.dumps(own))
    assert read('--config', str(path)) == own and read('--config', str(path), '--steps', '9') == own | {'steps': 9}
    for text, words in (('{"steps": 7', 'is not a JSON file'), ('['*100_000, 'is not a JSON file'), ('[7]', 'holds no settings by name'), ('{"stepz": 7}', 'did you mean steps')):
        path.write_text(text)
        with pytest.raises(UsageError, match=words): read('--config', str(path))


def test_the_help_of_many_settings_has_headings():
    text = parser_of('train', '', flags_of(TrainConfig)).format_help()
    parts = [cls for cls in TrainConfig.__mro__ if '__dataclass_fields__' in vars(cls) and cls is not TrainConfig]
    for cls in parts:
        heading, own = text.index(cls.__doc__.rstrip('.') + ':'), next(iter(cls.__annotations__))
        assert heading < text.index('--' + own.replace('_', '-') + ' ')
    assert len({text.index(cls.__doc__.rstrip('.')) for cls in parts}) == len(parts) == 5


def test_words_are_those_that_a_person_would_type():
    assert words_of({'kl_coef': .05, 'bf16': True, 'cuda_graphs': False, 'steps': None, 'penalty': -.3}) == [
        '--kl-coef', '0.05', '--bf16', '--no-cuda-graphs', '--steps', 'none', '--penalty=-0.3']


def test_what_is_not_typed_is_not_read():
    assert read() == {}


@pytest.mark.parametrize('text, said', [
    ('steps = 3\nsteps = 4', 'not a TOML file'), ('[train]\nsteps = 3', 'train is a table'), ('step = 3', 'did you mean steps?'),
    ('steps = [3, 4]', 'steps is a list'), ('batch-positions = 3\nbatch_positions = 3', 'is there twice'), ('steps = 3.0', "steps: '3.0' is not a whole number"),
    ('bf16 = 1', "bf16: '1' is not one of true, false")])
def test_a_file_is_checked_like_words(text, said, tmp_path):
    (tmp_path/'run.toml').write_text(text)
    with pytest.raises(UsageError, match=str(said).replace('?', r'\?')) as caught:
        read('--config', str(tmp_path/'run.toml'))
    assert str(tmp_path/'run.toml') in str(caught.value)


def test_a_list_in_a_file_is_for_what_takes_several(tmp_path):
    settings = flags_of(cli.search)
    (tmp_path/'study.toml').write_text('space = ["nano", "lr=1e-4"]\ntrials = 3')
    assert read_settings(parser_of('search', '', settings), settings, ['--config', str(tmp_path/'study.toml')]) == {'space': ('nano', 'lr=1e-4'), 'trials': 3}


def test_names_of_a_file_may_have_either_line(tmp_path):
    for number, line in enumerate('-_'):
        (tmp_path/f'{number}.toml').write_text(f'batch{line}positions = 3')
        assert read('--config', str(tmp_path/f'{number}.toml')) == {'batch_positions': 3}


def test_flags_may_stand_in_any_order():
    pairs = [['--steps', '3'], ['--bf16'], ['--kl-coef=0.5']]
    found = [read(*itertools.chain(*order)) for order in itertools.permutations(pairs)]
    assert all(each == {'steps': 3, 'bf16': True, 'kl_coef': .5} for each in found)
