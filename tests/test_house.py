"""The rules of the house: fresh export, clean notebooks, layers, hygiene, lint, packaging."""
import ast
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
import tokenize
from configparser import ConfigParser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT/'rookworld_nb'
NOTEBOOKS = sorted(path for path in (ROOT/'nbs').glob('*.ipynb') if path.name[0] not in '_.')
SCRIPTS = Path(sys.executable).parent
NEEDS_JUPYTER = {'dashboard', 'play'}  # the modules that may import widgets
JUPYTER = {'IPython', 'ipykernel', 'ipywidgets', 'jupyter', 'jupyter_client', 'jupyter_core', 'jupyterlab', 'nbclient',
           'nbconvert', 'nbformat', 'traitlets', 'comm'}
NBDEV = {'execnb', 'fastcore', 'fastgit', 'ghapi', 'nbdev'}
SETTINGS = ConfigParser(delimiters=['='])
SETTINGS.read(ROOT/'settings.ini', encoding='utf-8')


def cells(notebook: Path, kind: str = 'code') -> list[dict]:
    """The cells of one kind."""
    return [cell for cell in json.loads(notebook.read_text(encoding='utf-8'))['cells'] if cell['cell_type'] == kind]


def source(cell: dict) -> str:
    """A cell's text: notebooks store it as one string or as a list of lines."""
    return ''.join(cell['source'])


def exported(cell: dict) -> bool:
    """Does nbdev put this cell into the package?"""
    return bool(re.match(r'#\|\s*exports?\b', source(cell)))


def module_of(notebook: Path) -> str | None:
    """The name after `default_exp`, or None for a notebook that exports nothing."""
    found = [re.search(r'^#\|\s*default_exp (\S+)', source(cell), re.M) for cell in cells(notebook)]
    return next((match[1] for match in found if match), None)


FLOOR = {module_of(path): rank for rank, path in enumerate(NOTEBOOKS) if path.name[0].isdigit() and module_of(path)}
MODULES = [PACKAGE/f'{module}.py' for module in sorted(FLOOR, key=FLOOR.get)]
TREES = {path.stem: ast.parse(path.read_text(encoding='utf-8')) for path in MODULES if path.exists()}


def copy_of_the_tree(target: Path) -> Path:
    """The working tree without environments and build products."""
    skip = shutil.ignore_patterns('.git', '.venv', 'runs', 'work', 'build', 'dist', '*.egg-info', '__pycache__', '.*_cache',
                                  '.hypothesis', '.ipynb_checkpoints', '_*.ipynb', '_modidx.py')
    return Path(shutil.copytree(ROOT, target/'tree', ignore=skip))


def ids(path: Path) -> str:
    """The name of a test case that is a file."""
    return path.stem


# ---- the package and the README equal the notebooks

def test_export_is_fresh(tmp_path):
    tree = copy_of_the_tree(tmp_path)
    for path in (tree/'rookworld_nb').glob('[a-z]*.py'):    # of __init__.py only the version is exported
        path.unlink()
    subprocess.run([SCRIPTS/'nbdev_export'], cwd=tree, check=True, timeout=120)
    fresh, stored = ({path.name: path.read_text(encoding='utf-8') for path in folder.glob('*.py')
                      if path.name != '_modidx.py'} for folder in (tree/'rookworld_nb', PACKAGE))
    assert sorted(fresh) == sorted(stored)
    assert [name for name in fresh if fresh[name] != stored[name]] == [], 'run `make export`'


def test_notebooks_are_clean(tmp_path):
    tree = copy_of_the_tree(tmp_path)
    subprocess.run([SCRIPTS/'nbdev_clean'], cwd=tree, check=True, timeout=120)
    changed = [path.name for path in NOTEBOOKS if path.read_bytes() != (tree/'nbs'/path.name).read_bytes()]
    assert changed == [], 'run `nbdev_clean`'


def test_readme_equals_the_index():
    subprocess.run([sys.executable, ROOT/'.ci'/'readme', '--check'], check=True, timeout=120)


@pytest.mark.parametrize('module', TREES)
def test_a_module_says_in_a_sentence_what_it_is(module):
    assert (ast.get_docstring(TREES[module]) or '').endswith('.'), 'the first cell needs a line "> A sentence." after its title: nbdev makes it the docstring'


@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=ids)
def test_no_list_is_taken_for_front_matter(notebook):
    first = cells(notebook, 'markdown')[0]
    assert re.findall(r'^-\s+\S.*:.*\S\s*$', source(first), re.M) == [], 'nbdev reads these lines as YAML: begin them with *'


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r'(?:\]\(|src=")(?![a-z]+:|#)([^)"]+)', (ROOT/'README.md').read_text(encoding='utf-8'))
    assert [link for link in links if not (ROOT/link).exists()] == []
    assert [path.name for path in NOTEBOOKS if f'nbs/{path.name}' not in links and path.name != 'index.ipynb'] == [], 'not in the README'


# ---- layers

def imported(tree: ast.AST, top_level_only: bool = False) -> set[str]:
    """Absolute dotted names of everything a module imports; relative ones count from the package."""
    names = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = '.'.join(filter(None, ('rookworld_nb' if node.level else '', node.module)))
            names |= {f'{base}.{alias.name}' for alias in node.names} if base == 'rookworld_nb' else {base}
    return names


def test_every_module_has_one_notebook():
    assert {path.stem for path in PACKAGE.glob('*.py')} - {'__init__', '_modidx'} == set(FLOOR)
    assert len(FLOOR) == sum(module_of(path) is not None for path in NOTEBOOKS)
    assert len(set(FLOOR.values())) == len(FLOOR)


@pytest.mark.parametrize('module', TREES)
def test_imports_go_down(module):
    inner = {name.split('.')[1] for name in imported(TREES[module]) if name.startswith('rookworld_nb.')}
    upward = sorted(name for name in inner & set(FLOOR) if FLOOR[name] >= FLOOR[module])
    assert upward == [], f'{module} (notebook {FLOOR[module]:02d}) imports from its own floor or above'


@pytest.mark.parametrize('module', TREES)
def test_imports_are_declared(module):
    def roots(section: str) -> set[str]:
        names = {Requirement(text).name.replace('-', '_') for text in SETTINGS['DEFAULT'][section].split()}
        return {'PIL' if name == 'pillow' else name for name in names}
    at_import = {name.split('.')[0] for name in imported(TREES[module], top_level_only=True)}
    anywhere = {name.split('.')[0] for name in imported(TREES[module])}
    free = set(sys.stdlib_module_names) | {'rookworld_nb', 'triton'} | roots('requirements')    # PyTorch brings Triton for GPUs
    assert anywhere & NBDEV == set()
    if module in NEEDS_JUPYTER:
        free |= JUPYTER
    assert at_import - free == set(), 'imported by the module, but not a runtime requirement'
    assert anywhere - free - roots('hub_requirements') == set(), 'imported in a function, but no requirement or extra'


# ---- hygiene of the notebooks

@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=ids)
def test_notebook_hygiene(notebook):
    document = json.loads(notebook.read_text(encoding='utf-8'))
    assert 'widgets' not in document['metadata'], 'stores widget state'
    assert len(document['cells']) <= 70, 'more than 70 cells: join small ones'
    code = cells(notebook)
    outputs = [output for cell in code for output in cell['outputs']]
    assert [output['ename'] for output in outputs if output['output_type'] == 'error'] == [], 'stores a traceback'
    assert not any('Error in callback' in json.dumps(output) for output in outputs), 'a picture that could not be drawn'
    assert not any('application/vnd.jupyter.widget-view+json' in output.get('data', {}) for output in outputs), \
        'a widget, which is an error message where its kernel has ended'
    assert sum(len(json.dumps(output)) for output in outputs) <= 300_000, 'outputs of more than 300,000 characters'
    lines = [source(cell).splitlines() for cell in code if exported(cell)]
    assert [cell[1] for cell in lines if len(cell) > 40] == [], 'exported cells of more than 40 lines'
    assert [line for cell in lines for line in cell if len(line) > 120] == [], 'exported lines over 120 characters'
    if notebook.name[0].isdigit():
        assert any(outputs) or not code, 'stored without any output'


@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=ids)
def test_imports_have_cells_of_their_own(notebook):
    for cell in cells(notebook):
        text = re.sub(r'^\s*[%!].*$', '', source(cell), flags=re.M)
        body = ast.parse(text).body
        stars = [node for node in ast.walk(ast.parse(text))
                 if isinstance(node, ast.ImportFrom) and node.names[0].name == '*']
        assert not stars, f'star import in: {text[:60]}'
        imports = [isinstance(node, ast.Import | ast.ImportFrom) for node in body]
        assert all(imports) or not any(imports), f'imports and other code in: {text[:60]}'


def test_no_machine_paths():
    machine = re.compile(r'(?<![\w.])/(home|Users|work|root|mnt|tmp)/[\w.]')
    text = [path for folder in ('nbs', 'rookworld_nb', '.ci') for path in sorted((ROOT/folder).glob('*'))
            if path.suffix in {'.ipynb', '.py', ''} and path.is_file()]
    found = [f'{path.name}: {line.strip()[:100]}' for path in [*text, ROOT/'Makefile', ROOT/'README.md']
             for line in path.read_text(encoding='utf-8').splitlines() if len(line) < 20_000 and machine.search(line)]
    assert found == []


# ---- hygiene of the code: a docstring for each public name, a comment for each parameter and field

def undocumented(path: Path) -> list[str]:
    """Public functions, classes, methods, parameters and fields of a module that say nothing about themselves."""
    text = path.read_text(encoding='utf-8')
    tree = ast.parse(text)
    comments = {token.start[0] for token in tokenize.generate_tokens(io.StringIO(text).readline)
                if token.type == tokenize.COMMENT}
    missing = []

    def function(node: ast.FunctionDef, name: str) -> None:
        special = node.name.startswith('__')
        if not ast.get_docstring(node) and not special:
            missing.append(f'{name} has no docstring')
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        arguments = [a for a in arguments if a and a.arg not in ('self', 'cls')]
        lines = [a.end_lineno for a in arguments]
        if not special or node.name == '__init__':
            missing.extend(f'{name}({a.arg}) has no comment' for a in arguments
                           if a.end_lineno not in comments or lines.count(a.end_lineno) > 1)

    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith('_'):
            function(node, node.name)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
            if not ast.get_docstring(node):
                missing.append(f'{node.name} has no docstring')
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and not re.match(r'_[^_]', part.name):
                    function(part, f'{node.name}.{part.name}')
                elif isinstance(part, ast.AnnAssign) and part.end_lineno not in comments:
                    missing.append(f'{node.name}.{part.target.id} has no comment')
    return missing


@pytest.mark.parametrize('module', TREES)
def test_public_names_are_documented(module):
    assert undocumented(PACKAGE/f'{module}.py') == []


def test_lint():
    subprocess.run([SCRIPTS/'ruff', 'check', '--no-cache', 'rookworld_nb', 'tests', 'benchmarks'], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize('script', sorted((ROOT/'benchmarks').glob('*.py')), ids=lambda path: path.stem)
def test_every_benchmark_starts_and_is_listed(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [str(script), '--help'])
    monkeypatch.syspath_prepend(script.parent)    # as Python does when it runs a script
    with pytest.raises(SystemExit, match='^0$'): runpy.run_path(str(script), run_name='__main__')
    assert capsys.readouterr().out.startswith(f'usage: {script.name}') and f'`{script.name}`' in (ROOT/'CONTRIBUTING.md').read_text()


# ---- the commands of the README

def test_missing_debian_packages_cost_one_line(tmp_path):
    for program in ('bash', 'id'):  # a machine with neither apt-get nor sudo
        (tmp_path/program).symlink_to(shutil.which(program))
    wanted = ['bash:bash:nothing', 'chessengine:chess-engine:games against an engine']
    done = subprocess.run(['bash', ROOT/'.ci'/'debian', *wanted], env={'PATH': str(tmp_path)}, text=True, capture_output=True, timeout=60)
    assert done.returncode == 1 and done.stderr == '' and len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith('Skipped: games against an engine') and 'apt-get install chess-engine' in done.stdout
    done = subprocess.run(['bash', ROOT/'.ci'/'debian', wanted[0]], env={'PATH': str(tmp_path)}, text=True, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def dry_run(target: str, tree: Path) -> str:
    """What make would do on a machine that has nothing yet."""
    return subprocess.run(['make', '-n', target], cwd=tree, check=True, text=True, capture_output=True, timeout=60).stdout


@pytest.mark.skipif(not shutil.which('make'), reason='make is not installed')
def test_each_command_stands_alone(tmp_path):
    tree = copy_of_the_tree(tmp_path)
    pin = next(line for line in (ROOT/'constraints.txt').read_text().splitlines() if line.startswith('torch=='))
    for target, extra, last in (('train', '', 'rookworld train'), ('test', '[dev]', '.ci/test')):
        plan = dry_run(target, tree)
        steps = ['-m venv', f'-c constraints.txt {pin}', f"-c constraints.txt -e '.{extra}'", last]
        assert [plan.find(step) for step in steps] == sorted(plan.find(step) for step in steps)
        assert all(step in plan for step in steps)
    assert 'apt-get' not in dry_run('train', tree) and 'stockfish' not in dry_run('train', tree)


# ---- packaging

@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> Path:
    """The wheel that `python -m build` makes from the sdist that it makes from a clean tree."""
    folder = tmp_path_factory.mktemp('wheel')
    tree = copy_of_the_tree(folder)
    subprocess.run([sys.executable, '-m', 'build', '--no-isolation', '--outdir', folder/'dist', tree], check=True,
                   timeout=300, capture_output=True)
    return next((folder/'dist').glob('*.whl'))


def runtime_only(target: Path, wheel: Path) -> Path:
    """A folder with the wheel and its runtime requirements and nothing else: links to what pip would install."""
    subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index', '--target', target,
                    wheel], check=True, timeout=120)
    info = next(target.glob('*.dist-info'))
    waiting = re.findall(r'^Requires-Dist: (.+)$', (info/'METADATA').read_text(encoding='utf-8'), re.M)
    seen = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        wanted = not requirement.marker or requirement.marker.evaluate({'extra': ''})
        if not wanted or requirement.name.lower() in seen:
            continue
        seen.add(requirement.name.lower())
        installed = distribution(requirement.name)
        assert installed.version in requirement.specifier
        waiting += installed.requires or []
        for part in {file.parts[0] for file in installed.files} - {'..', '__pycache__'}:
            link = target/part
            link.exists() or link.symlink_to(installed.locate_file(part))
    return target


@pytest.mark.slow
def test_wheel_works_without_jupyter(wheel, tmp_path):
    site = runtime_only(tmp_path/'site', wheel)
    modules = [module for module in TREES if module not in NEEDS_JUPYTER]
    program = f'''
import sys
sys.path.insert(0, {str(site)!r})
import importlib, importlib.util
for name in {sorted(JUPYTER | NBDEV)!r}:
    assert importlib.util.find_spec(name) is None, f"{{name}} is importable: the environment is not empty"
for module in {modules!r}:
    loaded = importlib.import_module("rookworld_nb." + module)
    assert loaded.__file__.startswith({str(site)!r}), loaded.__file__
from rookworld_nb.positions import shipped
from rookworld_nb.sampling import sample
from rookworld_nb.weights import load_pretrained
model, tokenizer = load_pretrained("nano")
heldout = shipped("heldout")
rollouts = sample(model, tokenizer, [heldout[0].prompt], group_size=2, max_new_tokens=8, temperature=1.0)
print("works", len(heldout), rollouts.completion_ids.shape)
'''
    done = subprocess.run([sys.executable, '-I', '-S', '-c', program], cwd=tmp_path, text=True, capture_output=True,
                          timeout=300)
    assert done.returncode == 0 and done.stdout.startswith('works'), done.stderr[-3000:]


@pytest.mark.slow
def test_wheel_holds_what_it_needs_and_no_more(wheel):
    import zipfile
    names = {name.split('/', 1)[1] for name in zipfile.ZipFile(wheel).namelist() if name.startswith('rookworld_nb/')}
    shipped = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob('*')
               if path.is_file() and '__pycache__' not in path.parts and path.name != '_modidx.py'}
    assert names == shipped
    metadata = zipfile.ZipFile(wheel).read(next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith('METADATA')))
    assert b'License-Expression: MIT' in metadata or b'License: MIT' in metadata
    targets = re.findall(r'\]\(([^)]*)\)|src="([^"]*)"', metadata.decode())
    assert len(targets) > 50 and all(link.startswith('https://') or picture.startswith('https://') for link, picture in targets)
