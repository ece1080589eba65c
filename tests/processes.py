"Processes as Linux shows them, for tests of what outlives its starter."
from pathlib import Path


def is_running(process: int) -> bool:
    "Whether a process is there, and no zombie that nobody has collected."
    try: return Path(f'/proc/{process}/stat').read_text().rpartition(') ')[2][0] != 'Z'
    except (FileNotFoundError, ProcessLookupError): return False


def children_of(process: int) -> list[int]:
    "The processes that a process has started."
    return [int(child) for child in Path(f'/proc/{process}/task/{process}/children').read_text().split()]
