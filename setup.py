"""Packaging: names, versions and requirements come from settings.ini, which nbdev reads too."""
import re
from configparser import ConfigParser
from pathlib import Path

import setuptools

HERE = Path(__file__).parent
config = ConfigParser(delimiters=['='])
config.read(HERE/'settings.ini', encoding='utf-8')
settings = config['DEFAULT']
library = settings['lib_path']


def absolute(text: str) -> str:
    "The README with links and pictures that PyPI shows too."
    text = re.sub(r'(!\[[^]]*\]\(|src=")(?![a-z]+:|#)', rf"\g<1>{settings['git_url']}/raw/main/", text)
    return re.sub(r'(\]\()(?![a-z]+:|#)', rf"\g<1>{settings['git_url']}/blob/main/", text)


setuptools.setup(
    name=settings['lib_name'], version=settings['version'], description=settings['description'],
    author=settings['author'], author_email=settings['author_email'], keywords=settings['keywords'].split(),
    url=settings['git_url'], license='MIT', python_requires='>='+settings['min_python'],
    project_urls={'Changelog': settings['git_url']+'/blob/main/CHANGELOG.md', 'Issues': settings['git_url']+'/issues'},
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: '+settings['audience'],
                 'Framework :: Jupyter', 'Programming Language :: Python :: 3',
                 'Topic :: Games/Entertainment :: Board Games',
                 'Topic :: Scientific/Engineering :: Artificial Intelligence', 'Typing :: Typed'],
    long_description=absolute((HERE/'README.md').read_text(encoding='utf-8')), long_description_content_type='text/markdown',
    packages=[library], package_data={library: ['assets/*', 'assets/nano/*', 'py.typed']},
    install_requires=settings['requirements'].split(),
    extras_require={extra: settings[f'{extra}_requirements'].split()
                    for extra in ('notebook', 'hub', 'tensorboard', 'wandb', 'search', 'parity', 'dev')},
    entry_points={'console_scripts': [settings['console_scripts']]},
    zip_safe=False)
