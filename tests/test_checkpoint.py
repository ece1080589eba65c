"Beside 20_checkpoint: kills at any moment, and files that are not what was written."
import os
import shutil

import numpy as np
import pytest

from rookworld_nb.checkpoint import CheckpointError, first_whole, read_checkpoint, sweep, write_checkpoint
from rookworld_nb.weights import load_pretrained


def test_a_kill_while_a_checkpoint_is_replaced_leaves_a_whole_one_or_none(tmp_path, monkeypatch):
    folder, parts = tmp_path/'final_checkpoint', load_pretrained('nano')
    steps = 0    # folders renamed or taken away before the kill
    def dying(work):
        def step(path, *rest, **options):
            nonlocal left
            left -= 1
            if left < 0 and work is shutil_rmtree and os.path.exists(path): next(path.iterdir()).unlink()
            if left < 0: raise KeyboardInterrupt
            return work(path, *rest, **options)
        return step
    os_replace, shutil_rmtree, killed = os.replace, shutil.rmtree, True
    while killed:
        shutil_rmtree(tmp_path)
        tmp_path.mkdir()
        write_checkpoint(folder, *parts, {'age': 'old'})
        left = steps
        monkeypatch.setattr('rookworld_nb.checkpoint.shutil.rmtree', dying(shutil_rmtree))
        monkeypatch.setattr('rookworld_nb.checkpoint.os.replace', dying(os_replace))
        try: write_checkpoint(folder, *parts, {'age': 'new'})
        except KeyboardInterrupt: killed = True
        else: killed = False
        monkeypatch.undo()
        assert not folder.exists() or read_checkpoint(folder)['age'] in ('old', 'new')
        steps += 1
    assert steps > 2 and read_checkpoint(folder) == {'age': 'new'} and [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_every_file_is_looked_at_and_named(tmp_path):
    folder = tmp_path/'checkpoint-1'
    write_checkpoint(folder, *load_pretrained('nano'), {'trainer': {'step': 1}})
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[:-2])
        with pytest.raises(CheckpointError, match=path.name if path.name != 'SHA256SUMS' else r'\.(pt|json|safetensors)'): read_checkpoint(folder)
        path.write_bytes(content)
    assert read_checkpoint(folder) == {'trainer': {'step': 1}}


def test_what_is_more_than_plain_values_is_passed_over(tmp_path):
    for step, value in ((1, 1.), (2, np.float64(1.))):
        write_checkpoint(tmp_path/f'checkpoint-{step}', *load_pretrained('nano'), {'value': value})
    with pytest.raises(CheckpointError, match='plain values'): read_checkpoint(tmp_path/'checkpoint-2')
    assert first_whole([tmp_path/'checkpoint-2', tmp_path/'checkpoint-1'])[0].name == 'checkpoint-1'


def test_what_a_kill_left_half_written_is_swept_away(tmp_path):
    write_checkpoint(tmp_path/'checkpoint-1', *load_pretrained('nano'), {'step': 1})
    for name in ('.checkpoint-2.part', '..checkpoint-2.part.77.partial', '.checkpoint-1.old'): (tmp_path/name/'in').mkdir(parents=True)
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {'checkpoint-1', '.checkpoint-1.old'}
