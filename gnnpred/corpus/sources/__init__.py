"""What each published source timed, and which model its names stand for.

Every module here names the source ids it reads and turns one record of the raw tables into an
:class:`~gnnpred.corpus.sources.record.Interpretation`. Only figures are used; each row keeps the
repository, commit and file it came from.
"""

from gnnpred.corpus.sources import (
    academic,
    distributed,
    language_models,
    single_host,
    suites,
    timm_tables,
    torchvision_tables,
)

SOURCES = (timm_tables, torchvision_tables, suites, single_host, academic, distributed, language_models)
