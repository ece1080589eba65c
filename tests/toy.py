"The toy that the tests of the parts train: counting, by a policy of a few thousand weights."
import copy

from rookworld_nb.buffer import Collector, CollectorConfig, CountingTask
from rookworld_nb.positions import PromptMix

TASK, G = CountingTask(), 4


def collector(model, ref_model='copy', env=.5, prompts=4, scorer=TASK, batches=None, **options):
    reference = copy.deepcopy(model) if ref_model == 'copy' else ref_model
    config = CollectorConfig(**{'group_size': G, 'temperature': 1., 'max_new_tokens': 2, 'max_new_tokens_env': 3, **options})
    return Collector(model, reference, TASK.tokenizer, batches or PromptMix(TASK.samples, prompts, env), scorer, config)
