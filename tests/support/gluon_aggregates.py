"""Small Gluon kernels with aggregates and constants, right or with one planted bug (BUG)."""

# Aggregates are checked against their annotations, so these must not be postponed.
import hopper_gluon  # noqa: F401
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from diyfa.backends.cuda.gluon.compat import aggregate


@aggregate
class Cell:
    """Shared memory that one partition fills and another reads."""

    memory: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    SIZE: gl.constexpr

    @gluon.jit
    def positions(self, NUM_WARPS: gl.constexpr):
        return gl.arange(0, self.SIZE, layout=gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))

    @gluon.jit
    def fill(self, values):
        self.memory.store(values)
        mbarrier.arrive(self.full, count=1)

    @gluon.jit
    def read(self, NUM_WARPS: gl.constexpr):
        mbarrier.wait(self.full, 0)
        return self.memory.load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))


@aggregate
class Job:
    cell: Cell
    n: gl.tensor
    extra: gl.tensor | gl.constexpr
    FACTOR: gl.constexpr

    @gluon.jit
    def plus(self, n):
        return Job(self.cell, self.n + n, self.extra, FACTOR=self.FACTOR)


@gluon.jit
def _write(job, BUG: gl.constexpr):
    n = 0
    while n < job.n:  # a loop carries an aggregate
        job = job.plus(-1)
        n += 1
    # job.n is half of what it was, rounded down: division rounds towards zero.
    if BUG == "float":
        job = Job(job.cell, job.n, None, job.n)
    if BUG != "no fill":
        job.cell.fill(job.cell.positions(1) * job.FACTOR + (job.n - 8) // 3)


@gluon.jit
def _read(job, out_ptr):
    gl.store(out_ptr + job.cell.positions(4), job.cell.read(4))


@gluon.jit
def constant_in_rounds(out_ptr):
    for i in gl.static_range(2):
        TWICE: gl.constexpr = i * 2
        gl.store(out_ptr + i, TWICE)


@gluon.jit
def through_partitions(out_ptr, n, FACTOR: gl.constexpr, BUG: gl.constexpr):
    """out[i] = FACTOR * i + (n // 2 - 8) / 3, rounded towards zero."""
    SIZE: gl.constexpr = 64
    memory = gl.allocate_shared_memory(gl.int32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    cell = Cell(memory, full, SIZE)
    if BUG == "block":
        job = Job(cell, n, cell.positions(4), FACTOR)
    elif BUG == "field missing":
        job = Job(cell, n, FACTOR)
    elif BUG == "wrong type":
        job = Job(cell, cell, None, FACTOR)
    else:
        job = Job(cell, n, None, FACTOR)
    gl.warp_specialize([(_read, (job, out_ptr)), (_write, (job, BUG))], [1], [24])
