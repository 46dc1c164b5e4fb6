"""Where users' ``tensor_parallel_plan()`` has always found its styles."""

from strategies.models.tensor_parallel import Column as Column
from strategies.models.tensor_parallel import Replicated as Replicated
from strategies.models.tensor_parallel import Row as Row
from strategies.models.tensor_parallel import Shard as Shard
from strategies.models.tensor_parallel import Split as Split
from strategies.models.tensor_parallel import Stream as Stream
from strategies.models.tensor_parallel import TensorRanks as TensorRanks
from strategies.models.tensor_parallel import Vocabulary as Vocabulary
