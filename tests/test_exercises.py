"""The exercises and quizzes at the end of the chapters: every answer that is code runs, and every chapter has its share."""
import json
import linecache
import re
from functools import cache
from pathlib import Path

import pytest

NBS = Path(__file__).resolve().parent.parent/'nbs'
CHAPTERS = {path.stem: path for path in [*sorted(NBS.glob('[0-9][0-9]*.ipynb')), NBS/'gains.ipynb', NBS/'processes.ipynb', NBS/'speed.ipynb']}
EXERCISES, QUESTIONS = 3, 5
ANSWER = re.compile(r'<details>\s*<summary>\s*Answer\s*</summary>(.*?)</details>', re.S)
CODE = re.compile(r'^[ ]*```python[ ]*\n(.*?)^[ ]*```[ ]*$', re.S | re.M)
NUMBER = re.compile(r'^(?:#+ |\*\*)?(\d+)\. ', re.M)


@cache
def sections(chapter: str) -> dict[str, str]:
    """The markdown of a chapter by second-level heading, each text without its heading; cells joined."""
    cells = json.loads(CHAPTERS[chapter].read_text(encoding='utf-8'))['cells']
    text = '\n\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown')
    parts = re.split(r'^## +(.+?) *$', text, flags=re.M)
    return {heading: body for heading, body in zip(parts[1::2], parts[2::2])}


def answers(chapter: str, heading: str) -> list[str]:
    """What stands in the answer blocks of a section, in order."""
    return ANSWER.findall(sections(chapter).get(heading, ''))


def numbers(chapter: str, heading: str) -> list[int]:
    """The numbers of a section's items, answers left out."""
    return [int(number) for number in NUMBER.findall(ANSWER.sub('', sections(chapter).get(heading, '')))]


BLOCKS = {f'{chapter}-{number}' + (f'-{part}' if part else ''): code for chapter in CHAPTERS
          for number, answer in enumerate(answers(chapter, 'Exercises'), 1) for part, code in enumerate(CODE.findall(answer))}


@pytest.mark.parametrize('block', BLOCKS)
def test_the_answer_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, code = f'<{block}>', BLOCKS[block]
    monkeypatch.setitem(linecache.cache, name, (len(code), None, code.splitlines(True), name))    # its source can be found, as in a notebook
    exec(compile(code, name, 'exec'), {'__name__': '__main__'})


@pytest.mark.parametrize('chapter', CHAPTERS)
def test_every_chapter_has_exercises_and_a_quiz(chapter):
    assert {'Exercises', 'Quiz'} <= set(sections(chapter)), 'a section is missing'
    solved = answers(chapter, 'Exercises')
    assert len(solved) >= EXERCISES and numbers(chapter, 'Exercises') == [*range(1, len(solved)+1)]
    assert len(answers(chapter, 'Quiz')) == QUESTIONS and numbers(chapter, 'Quiz') == [*range(1, QUESTIONS+1)]
    assert all(answer.strip() for answer in answers(chapter, 'Quiz')), 'an empty answer in the quiz'
    for number, answer in enumerate(solved, 1):
        code = '\n'.join(CODE.findall(answer))
        assert re.search(r'\bassert', code), f'answer {number} asserts nothing'
        assert CODE.sub('', answer).strip(), f'answer {number} is code without a sentence'
