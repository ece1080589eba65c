"`rookworld push`: exactly what would be sent, nothing else, in one commit; and what is missing is said."
import hashlib
import json
import re
import sys

import pytest
from safetensors.torch import save_file

from rookworld_nb import cli, weights
from rookworld_nb.weights import HubError, load_pretrained, push, push_lines, push_list, save_pretrained

MODEL = {'config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json'}


@pytest.fixture
def checkpoint(tmp_path):
    "A checkpoint folder, with what must stay at home."
    folder = save_pretrained(*load_pretrained('nano'), tmp_path/'run'/'checkpoint-5')
    for name in ('trainer.pt', 'SHA256SUMS', 'memory_profiles.json', '.env', 'notes.txt', 'optimizer.safetensors'): (folder/name).write_bytes(b'private')
    (folder/'completions').mkdir()
    (folder/'completions'/'config.json').write_text('{}')
    return folder


class Hub:
    "Stands in for huggingface_hub."
    def __init__(self, fails=None): self.calls, self.fails = [], fails
    def get_token(self): return 'token'
    def CommitOperationAdd(self, name, what): return name, what
    def HfApi(self, **options): return self
    def create_repo(self, repo_id, **options): self.calls.append(('repo', repo_id, options))

    def create_commit(self, repo_id, operations, **options):
        if self.fails: raise self.fails
        self.calls.append(('commit', repo_id, dict(operations), options))
        return type('Info', (), {'commit_url': f'https://hub/{repo_id}/commit/1'})


def said_of(words, capsys):
    code = cli.main(['push', *map(str, words)])
    out = capsys.readouterr()
    return code, out.out.splitlines(), out.err


def test_a_new_repository_is_private_unless_something_else_is_said(checkpoint, monkeypatch, capsys):
    for words, private in (([], True), (['--private'], True), (['--no-private'], False)):
        monkeypatch.setitem(sys.modules, 'huggingface_hub', hub := Hub())
        assert said_of(['--model', checkpoint, '--to', 'me/chess', *words], capsys)[0] == 0
        assert hub.calls[0] == ('repo', 'me/chess', {'private': private, 'exist_ok': True})
        assert hub.calls[1][3] == {'commit_message': 'Upload model', 'revision': None}
    push(push_list(checkpoint, 'me/chess'), 'me/chess')
    assert hub.calls[-2][2] == {'private': True, 'exist_ok': True}


def test_a_dry_run_lists_exactly_what_is_sent(checkpoint, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)    # not needed
    code, lines, _ = said_of(['--model', checkpoint, '--to', 'me/chess', '--dry-run'], capsys)
    rows = [re.fullmatch(r' *([\d,]+)  ([0-9a-f]{64})  (\S+)( \(written for this push\))?', line) for line in lines[:-2]]
    assert code == 0 and {row[3] for row in rows} == MODEL | {'README.md'} and lines[-1] == 'would go to me/chess'
    for row in rows:
        assert bool(row[4]) == (row[3] == 'README.md')
        if not row[4]: assert row[2] == hashlib.sha256((checkpoint/row[3]).read_bytes()).hexdigest()
    assert sum(int(row[1].replace(',', '')) for row in rows) == int(lines[-2].split()[0].replace(',', '')) and 'in 5 files' in lines[-2]
    hub = Hub()
    monkeypatch.setitem(sys.modules, 'huggingface_hub', hub)
    code, again, _ = said_of(['--model', checkpoint, '--to', 'me/chess', '--no-private', '--revision', 'v2', '--message', 'hello'], capsys)
    assert code == 0 and again[:-1] == lines[:-1] and again[-1] == 'https://hub/me/chess/commit/1'
    (_, repo, options), (_, _, sent, how) = hub.calls
    assert (repo, options) == ('me/chess', {'private': False, 'exist_ok': True}) and how == {'commit_message': 'hello', 'revision': 'v2'}
    assert list(sent) == [row[3] for row in rows]
    for row in rows:
        content = sent[row[3]] if isinstance(sent[row[3]], bytes) else open(sent[row[3]], 'rb').read()
        assert hashlib.sha256(content).hexdigest() == row[2]


def test_the_card_is_the_folders_own_where_it_has_one(checkpoint):
    card = push_list(checkpoint, 'me/chess')['README.md'].decode()
    cfg = load_pretrained(checkpoint)[0].cfg
    assert card.startswith('---\nlibrary_name') and '# chess' in card and "load_pretrained('me/chess')" in card and f'{cfg.n_layer} layers' in card
    (checkpoint/'README.md').write_text('mine')
    assert push_list(checkpoint, 'me/chess')['README.md'] == checkpoint/'README.md'
    assert set(push_list('nano', 'me/nano')) == MODEL | {'README.md'}


def test_a_damaged_model_is_not_sent(checkpoint, capsys):
    path = checkpoint/'model.safetensors'
    path.write_bytes(path.read_bytes()[:-8])
    code, lines, error = said_of(['--model', checkpoint, '--to', 'me/chess', '--dry-run'], capsys)
    assert code == 2 and not lines and 'model.safetensors' in error


def test_what_is_missing_is_said(monkeypatch):
    files = push_list(weights.model_folder('nano'), 'me/nano')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'huggingface_hub', None)
        with pytest.raises(HubError, match=r"pip install 'rookworld_nb\[hub\]'"): push(files, 'me/nano')
    hub = Hub()
    hub.get_token = lambda: None
    monkeypatch.setitem(sys.modules, 'huggingface_hub', hub)
    with pytest.raises(HubError, match='HF_TOKEN'): push(files, 'me/nano')
    assert hub.calls == []
    monkeypatch.setitem(sys.modules, 'huggingface_hub', Hub(ConnectionError('no\n network')))
    with pytest.raises(HubError, match='--to me/nano: nothing was changed, or only an empty repository made: no network'): push(files, 'me/nano')


def test_the_real_client_takes_the_list(monkeypatch):
    hub = pytest.importorskip('huggingface_hub')
    taken = []
    monkeypatch.setenv('HF_TOKEN', 'hf_none')
    monkeypatch.setattr(hub.HfApi, 'create_repo', lambda self, repo_id, **options: None)
    monkeypatch.setattr(hub.HfApi, 'create_commit', lambda self, repo_id, operations, **options: taken.extend(operations) or type('Info', (), {'commit_url': 'url'}))
    files = push_list(weights.model_folder('nano'), 'me/nano') | {'extra': b'bytes'}
    assert push(files, 'me/nano') == 'url' and [operation.path_in_repo for operation in taken] == list(files)
    assert [operation.upload_info.size for operation in taken] == [len(what) if isinstance(what, bytes) else what.stat().st_size for what in files.values()]
    assert len(push_lines(files)) == 7


def test_only_what_was_loaded_is_sent(tmp_path):
    model, tokenizer = load_pretrained('nano')
    folder = save_pretrained(model, tokenizer, tmp_path/'model')
    for name in ('model_old.safetensors', 'model-00001-of-00002.safetensors', 'model.safetensors.index.json', 'vocab.json', 'trainer.pt'):
        (folder/name).write_bytes(b'stale')
    assert set(push_list(folder, 'me/nano')) == MODEL | {'README.md'}
    tensors = weights.load_tensors(folder)
    (folder/'model.safetensors').unlink()
    halves = {'model-00001-of-00002.safetensors': {}, 'model-00002-of-00002.safetensors': {}}
    for i, (name, tensor) in enumerate(tensors.items()): halves[[*halves][i % 2]][name] = tensor
    for name, part in halves.items(): save_file(part, folder/name, metadata={'format': 'pt'})
    index = {'weight_map': {name: shard for shard, part in halves.items() for name in part}}
    (folder/'model.safetensors.index.json').write_text(json.dumps(index))
    assert set(push_list(folder, 'me/nano')) == MODEL - {'model.safetensors'} | {*halves, 'model.safetensors.index.json', 'README.md'}
