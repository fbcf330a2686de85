"""What the host half remembers of its observations from one pass to the next."""

from msgspec import Struct, field

from agent.host.observe.loader_cache import LoaderCache
from agent.system.ages import Ages
from agent.system.file_cache import FileCache


class Memory(Struct, frozen=True):
    """The ages of files, and results that stay valid as long as the files from which they came do not change."""

    loader_cache: LoaderCache = field(default_factory=LoaderCache)
    file_cache: FileCache = field(default_factory=FileCache)
    ages: Ages = field(default_factory=Ages)
