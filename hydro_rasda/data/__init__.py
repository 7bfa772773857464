"""Data in three forms, all read in the same way: every trial gets the same shuffle, and no example is left out.

The order of an epoch, and the random numbers that data sets and loaders draw for it, depend only on the run's seed and
the epoch. All trials of a group therefore share each batch, trials are compared on the same batches, and a resumed run
sees the same batches as an uninterrupted one. Batches are copies, so that writing to them does not change the data.
"""

from hydro_rasda.data.batch_splits import MOST_EXAMPLES as MOST_EXAMPLES
from hydro_rasda.data.batches import ALONE as ALONE
from hydro_rasda.data.batches import EVAL_BATCH_FACTOR as EVAL_BATCH_FACTOR
from hydro_rasda.data.batches import Batch as Batch
from hydro_rasda.data.batches import Batches as Batches
from hydro_rasda.data.batches import Data as Data
from hydro_rasda.data.batches import OwnData as OwnData
from hydro_rasda.data.batches import Part as Part
from hydro_rasda.data.batches import Shard as Shard
from hydro_rasda.data.batches import Share as Share
from hydro_rasda.data.batches import batch_length as batch_length
from hydro_rasda.data.batches import fresh as fresh
from hydro_rasda.data.batches import move as move
from hydro_rasda.data.batches import outline as outline
from hydro_rasda.data.first_pass import naming_batch as naming_batch
from hydro_rasda.data.first_pass import non_finite as non_finite
from hydro_rasda.data.first_pass import unlike as unlike
from hydro_rasda.data.folds import Folds as Folds
from hydro_rasda.data.folds import Splitter as Splitter
from hydro_rasda.data.folds import is_splitter as is_splitter
from hydro_rasda.data.folds import make_folds as make_folds
from hydro_rasda.data.folds import reseeded as reseeded
from hydro_rasda.data.tensors_datasets_loaders import make_batches as make_batches
