"""What several files of tests share. Properties are tried on the same examples in every run, so that a red light means a change;
`pytest --hypothesis-profile=default` looks for new ones."""
import pytest
from hypothesis import settings

from rookworld_nb.positions import by_task, shipped, write_lines

settings.register_profile('repeatable', derandomize=True)
settings.load_profile('repeatable')


@pytest.fixture(scope='session')
def lines(tmp_path_factory) -> str:
    "A small file of prompts: the shipped ones take seconds to read."
    path, pools = tmp_path_factory.mktemp('lines')/'lines.txt', by_task(shipped('heldout'))
    write_lines(pools['P'][-24:] + pools['A'][-8:], path)
    return str(path)
