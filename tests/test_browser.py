"""Dashboard and board in a real JupyterLab with a real Chromium: curves appear, clicks act, nothing fails in the page."""
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip('playwright.sync_api', reason='playwright is not installed')
pytest.importorskip('jupyterlab', reason='jupyterlab is not installed')
CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
if CHROMIUM is None: pytest.skip('no Chromium on the PATH', allow_module_level=True)

CELLS = ["""
import asyncio
import time
from IPython.display import display
from rookworld_nb.dashboard import Dashboard
from rookworld_nb.monitor import simulated_run

rows = [dict(prompt='P: 8/8/8/8/8/8/8/K6k w - - 0 1', completion='M: a1a2 <img src=x onerror="window.hacked = 1"> B: a1a2',
             task='P', format=1., best=.5, reward=.6, advantage=.4),
        dict(prompt='A: 8/8/8/8/8/8/8/K6k w - - 0 1+a1a2+a1a2+', completion='8/8/8/8/8/8/K7/7k b - - 1 1+0.001+0+0',
             task='A', format=1., fen=1., reward=1., advantage=-.4)]
""", """
dash = Dashboard(total_steps=100_000, kl_target=.05)
clicks = []
dash.stop.on_click(lambda _: clicks.append(dash.progress.step))
display(dash)
for metrics in simulated_run(100_000, collapse_at=20):
    time.sleep(.1)
    dash.update(metrics, rows)
    await asyncio.sleep(.02)
    if dash.stopped: break
print(f'clicked at {clicks}, ended at {dash.progress.step}')
dash.figure
"""]

STEERED = ["""
import time
from IPython.display import display
from rookworld_nb.dashboard import Dashboard
from rookworld_nb.monitor import simulated_run
from rookworld_nb.play import Partner, PlayBoard
from rookworld_nb.weights import load_pretrained

def fulfil(name, value):
    return f'after {dash.progress.step}: {name} {value}'
""", """
PlayBoard(Partner(*load_pretrained('nano')))
""", """
dash = Dashboard(total_steps=100_000, levers={'kl_coef': .02})
display(dash)
for metrics in simulated_run(100_000):
    time.sleep(.1)
    dash.update({name: metrics[name] for name in metrics if name != 'kl_coef'})
    if not await dash.listen(fulfil): break
"""]


def write_notebook(path: Path, sources: list[str]) -> None:
    """A small notebook."""
    cells = [dict(cell_type='code', id=f'cell-{i}', metadata={}, source=source.strip(), outputs=[], execution_count=None)
             for i, source in enumerate(sources)]
    kernel = dict(name='python3', display_name='python3', language='python')
    path.write_text(json.dumps(dict(cells=cells, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)))


def lab_command(port: int, root: Path) -> list[str]:
    """JupyterLab without a browser window or update checks, its application object exposed to the page."""
    return [sys.executable, '-m', 'jupyterlab', '--no-browser', '--allow-root', '--ip=127.0.0.1', f'--port={port}',
            '--ServerApp.port_retries=0', '--IdentityProvider.token=t', f'--ServerApp.root_dir={root}',
            '--LabApp.expose_app_in_browser=True', '--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate']


def wait_for_server(url: str, server: subprocess.Popen, log: Path, seconds: float = 90) -> None:
    """Until the server answers; its log if it does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(f'{url}/api/status?token=t', timeout=5).close()
            return
        except OSError: time.sleep(.25)
    pytest.fail(f'JupyterLab did not answer:\n{log.read_text()[-3000:]}')


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    """The address of a JupyterLab of our own on a folder with the notebook; nobody's settings, nobody's workspace."""
    tmp_path = tmp_path_factory.mktemp('lab')
    settings = tmp_path/'settings'/'@jupyterlab'
    for name, text in {'notebook-extension/tracker': '{"windowingMode": "none"}',  # all outputs stay in the page
                       'apputils-extension/notification': '{"fetchNews": "false", "checkForUpdates": false}'}.items():
        path = settings/f'{name}.jupyterlab-settings'
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path/'root').mkdir()
    write_notebook(tmp_path/'root'/'run.ipynb', CELLS)
    write_notebook(tmp_path/'root'/'steered.ipynb', STEERED)
    folders = {'CONFIG_DIR': 'config', 'DATA_DIR': 'data', 'RUNTIME_DIR': 'runtime'}
    env = dict(os.environ, JUPYTERLAB_SETTINGS_DIR=str(tmp_path/'settings'), JUPYTERLAB_WORKSPACES_DIR=str(tmp_path/'workspaces'),
               **{f'JUPYTER_{name}': str(tmp_path/folder) for name, folder in folders.items()})
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    with open(tmp_path/'lab.log', 'w') as log:
        server = subprocess.Popen(lab_command(port, tmp_path/'root'), env=env, stdout=log, stderr=log)
    try:
        wait_for_server(url := f'http://127.0.0.1:{port}', server, tmp_path/'lab.log')
        yield url
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def page():
    """A page that remembers the errors raised in it."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'])
        page = browser.new_page(viewport=dict(width=1280, height=1150))
        page.set_default_timeout(120_000)
        sync_api.expect.set_options(timeout=120_000)
        page.errors = []
        page.on('pageerror', lambda error: page.errors.append(str(error)))
        yield page
        browser.close()


def status(page) -> str:
    """The dashboard's line of status."""
    return page.locator('.rw-status').inner_text()


def wait_for_status(page, pattern: str) -> str:
    """Until the status matches; then the status."""
    page.wait_for_function('pattern => new RegExp(pattern).test(document.querySelector(".rw-status")?.innerText)', arg=pattern)
    return status(page)


def run_all(page, lab: str, name: str) -> None:
    """Open a notebook and run its cells."""
    page.goto(f'{lab}/lab/tree/{name}?token=t&reset')
    kernel = 'window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel?.status'
    page.wait_for_function(f"() => {kernel} === 'idle'")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")


def wait_for_text(page, selector: str, pattern: str) -> str:
    """Until an element's text matches; then the text."""
    page.wait_for_function('([selector, pattern]) => new RegExp(pattern).test(document.querySelector(selector)?.innerText)', arg=[selector, pattern])
    return page.locator(selector).first.inner_text()


def test_live_run_is_stopped_by_a_click(page, lab, tmp_path):
    run_all(page, lab, 'run.ipynb')
    wait_for_status(page, r'^Step (\d{2,}|[6-9]) of 100000')
    curves = page.locator('.rw-curves')
    assert curves.evaluate('image => image.naturalWidth') > 600
    first = curves.get_attribute('src')
    page.wait_for_function('old => document.querySelector(".rw-curves").src !== old', arg=first)  # it is redrawn
    wait_for_status(page, r'^Step ([3-9]\d|\d{3,}) of')
    assert page.locator('.rw-light').inner_text().split()[0] in ('green', 'yellow', 'red')
    sync_api.expect(page.locator('.rw-samples tbody tr')).to_have_count(2)
    assert '<img src=x' in page.locator('.rw-completion').last.inner_text()  # text, not an image
    assert page.evaluate('window.hacked') is None
    page.screenshot(path=tmp_path/'running.png')

    page.locator('.rw-stop').click()
    wait_for_status(page, r'^Stopped after step \d+ of 100000')
    said = r'clicked at \[(\d+)\], ended at (\d+)'
    page.wait_for_function('said => new RegExp(said).test(document.body.innerText)', arg=said)
    clicked, ended = map(int, re.search(said, page.inner_text('body')).groups())
    assert 0 <= ended - clicked <= 2
    sync_api.expect(page.locator('.rw-stop')).to_be_disabled()
    page.wait_for_function("() => document.querySelectorAll('.jp-OutputArea-output img[src^=\"data:image/png\"]').length > 0")
    page.screenshot(path=tmp_path/'stopped.png')
    assert page.errors == []


def test_a_run_is_steered_left_alone_and_followed_by_a_game(page, lab, tmp_path):
    run_all(page, lab, 'steered.ipynb')
    wait_for_status(page, r'^Step \d+ of 100000')
    page.locator('.rw-pause').click()
    paused = wait_for_status(page, r'^Paused after step \d+')
    page.locator('.rw-checkpoint').click()
    step = re.search(r'step (\d+)', paused)[1]
    wait_for_text(page, '.rw-news', rf'after {step}: checkpoint None')
    for button, value in (('more', .025), ('more', .032), ('less', .025)):    # each with its answer before the next
        page.locator(f'.rw-kl_coef .rw-{button}').click()
        wait_for_text(page, '.rw-news', rf'after {step}: kl_coef {value}$')
    assert status(page) == paused  # nothing was trained meanwhile
    page.screenshot(path=tmp_path/'paused.png')
    page.locator('.rw-pause').click()
    wait_for_status(page, r'^Step \d+ of')
    for value in (.032, .04):    # while the cell runs, too
        page.locator('.rw-kl_coef .rw-more').click()
        wait_for_text(page, '.rw-news', rf'kl_coef {value}$')

    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    left = int(re.search(r'Step (\d+)', wait_for_status(page, r'^Step \d+ of'))[1])
    page.goto('about:blank')  # the tab is closed; the kernel goes on
    time.sleep(3)
    page.goto(f'{lab}/lab/tree/steered.ipynb?token=t')
    back = int(re.search(r'Step (\d+)', wait_for_status(page, r'^Step \d+ of'))[1])
    assert back >= left + 5
    page.locator('.rw-stop').click()
    wait_for_status(page, r'^Stopped after step')

    page.locator('.rw-e2').click()  # the board has come back with the tab
    page.wait_for_selector('.rw-e4.rw-target')
    page.locator('.rw-e4').click()
    assert 'best move' in wait_for_text(page, '.rw-play-words', r'^[a-h][1-8]\w+, ')
    sync_api.expect(page.locator('.rw-e4')).to_have_text(re.compile('^\u265f'))
    sync_api.expect(page.locator('.rw-e2')).to_have_text(re.compile(r'^\s*$'))
    page.locator('.rw-play-thought svg').nth(1).wait_for()  # what it thought, and where it saw the move lead
    board, thought = (page.locator(name).bounding_box() for name in ('.rw-play .widget-gridbox', '.rw-play-thought'))
    assert thought['x'] >= board['x'] + board['width']  # beside the board, not below
    page.screenshot(path=tmp_path/'played.png')
    assert page.errors == []
