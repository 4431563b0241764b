"""Gradients shared by processes: by copies between GPUs of one machine, or by all-reduce."""

import ctypes
import os

import torch
import torch.distributed as dist
from torch import nn

from sd import kernels
from sd.kernels import floats
from sd.optim import check_all_trained, forget_gradients, gradient_of, strides, total_norm, whole_of


class Bucket:
    """Weights whose gradients travel between processes together: flat memory to send from and flat memory for the sums,
    which may be one, and in both (if not split) a view for each weight, which lies as the weight does."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, split: bool = False):
        """dtype: of what is sent. split: each process updates a part of these weights, all of which have bf16 copies,
        and these travel instead of the gradients' sums, of which each process has its part only."""
        self.parameters, self.dtype, self.split, self.missing = parameters, dtype, split, len(parameters)
        self.starts, self.size = [], 0
        for p in parameters:
            self.starts.append(self.size)
            self.size += -(-p.numel() // 8) * 8  # each begins at a multiple of 16 bytes

    def lay(self, flat: torch.Tensor, sums: torch.Tensor):
        self.flat, self.sums = flat, sums
        # A gradient's strides to the letter, where they say the same: one kernel copies many then.
        likes = [gradient_of(p) if strides(gradient_of(p)) == strides(p) else p for p in self.parameters]
        self.views, self.sum_views = self.views_of(flat, likes), None if self.split else self.views_of(sums, likes)

    def views_of(self, memory: torch.Tensor, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of such flat memory, one for each weight, which lies as in `likes`."""
        begin = memory.storage_offset()
        return [memory.as_strided(x.shape, x.stride(), begin + start) for x, start in zip(likes, self.starts)]

    def fill(self) -> list[torch.Tensor]:
        """With the gradients, which are returned: whoever drops them gives their memory to what comes next."""
        grads = [gradient_of(p) for p in self.parameters]
        torch._foreach_copy_(self.views, grads)
        forget_gradients(self.parameters)
        return grads


class AllReduce:
    """Adds up buckets over processes by the process group's own all-reduce, in the dtype they are sent in."""

    BUCKET = 32 << 20  # numbers
    extra_bytes = 0  # of memory that torch's allocator does not know

    def __init__(self, buckets: list[Bucket]):
        self.works, self.buckets = [], buckets
        for b in buckets:
            flat = torch.zeros(b.size, dtype=b.dtype, device=b.parameters[0].device)
            b.lay(flat, flat)

    def send(self, bucket: Bucket):
        bucket.fill()
        self.works.append(dist.all_reduce(bucket.flat, async_op=True))

    def wait(self):
        for work in self.works:
            work.wait()
        self.works.clear()

    def norm(self) -> torch.Tensor:
        """Of all sums together, fp32."""
        return total_norm([b.sums for b in self.buckets])

    def shares(self):
        """As PeerCopies.shares()."""
        return [(None, [(part, view) for b in self.buckets for part, view in zip(whole_of(b.parameters), b.sum_views)])]

    def reset(self):
        self.works.clear()


def _symmetric_empty(size: int, device: torch.device) -> torch.Tensor:
    """So many bytes that other processes' GPUs can be let into."""
    import torch.distributed._symmetric_memory as symmetric

    kind = getattr(symmetric, "get_backend", lambda device: None)(device)
    if kind in ("NVSHMEM", "NCCL"):
        raise RuntimeError(f"torch's symmetric memory is {kind}'s")
    return symmetric.empty(size, dtype=torch.uint8, device=device)


def _symmetric_handle(memory: torch.Tensor):
    """By which each process reaches the memory of all. All call this at once."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.rendezvous(memory, dist.group.WORLD.group_name)


def _peers(device: torch.device, other: int) -> bool:
    """Whether a GPU reaches another's memory, atomic operations included (over PCIe these would wait for ever)."""
    if not torch.cuda.can_device_access_peer(device, other):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value, ours, theirs = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    failed = driver.cuDeviceGet(ctypes.byref(ours), device.index) or driver.cuDeviceGet(ctypes.byref(theirs), other)
    native_atomics = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    failed = failed or driver.cuDeviceGetP2PAttribute(ctypes.byref(value), native_atomics, ours, theirs)
    return not failed and value.value == 1


class PeerCopies:
    """Adds up buckets over the processes of one machine, whose GPUs read each other's memory with their copy engines:
    products and convolutions keep all multiprocessors, of which NCCL's kernels hold some.

    A bucket has a part for each process. Each process copies its part from all others and adds them up in fp32. Of
    weights with bf16 copies, it then updates its part alone, and copies the other parts' bf16 weights from those who
    updated them; of the few others, it copies the other parts' sums, and all update all. All have the same bits.
    """

    BUCKET = 8 << 20  # numbers; the last ones' way is what the backward pass does not hide
    BLOCK = 1024
    TIMEOUT_MS = 600_000  # NCCL's too; after it the waiting kernel fails

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Whether torchrun started all processes on this machine, and this one's GPU reaches those of the others."""
        world = dist.get_world_size()
        here = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == world
        if not here or torch.cuda.device_count() < world:
            return False
        return all(_peers(device, i) for i in range(world) if i != device.index)

    @classmethod
    def made(cls, buckets: list[Bucket], dtype: torch.dtype) -> "PeerCopies | None":
        """For these buckets, where sums that travel have that dtype; None, in all processes, if one of them has not the
        memory, cannot reach the others' or finds other sums than an all-reduce."""
        way, fault = cls(buckets, dtype), None
        for step in (way._allocate, way._connect, way._try):
            try:
                step()
            except Exception as e:  # torch may yet change these functions, and NCCL does without them
                fault = (str(e) or type(e).__name__).splitlines()[0]
                print(f"note: gradients go by NCCL's kernels, not by copies ({fault})", flush=True)
            if not agreed(fault is None, way.device):
                return None
        way._house_copies()
        return way

    def __init__(self, buckets: list[Bucket], dtype: torch.dtype):
        """To be had from made()."""
        self.buckets, self.dtype, self.device = buckets, dtype, buckets[0].parameters[0].device
        self.rank, self.world, self.kept = dist.get_rank(), dist.get_world_size(), []
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None

    def _allocate(self):
        unit, self.places, self.extra_bytes = self.world * self.BLOCK, [], 0
        for b in self.buckets:
            b.padded = -(-b.size // unit) * unit
            b.mine = slice(self.rank * b.padded // self.world, (self.rank + 1) * b.padded // self.world)
            for kind in (b.dtype, torch.bfloat16 if b.split else self.dtype):
                self.places.append((b.padded, kind, self.extra_bytes // kind.itemsize))
                self.extra_bytes += b.padded * kind.itemsize
        torch.cuda.empty_cache()  # this is not from torch's allocator, which holds all that the passes needed
        self.memory = _symmetric_empty(self.extra_bytes, self.device)
        largest = max(b.padded for b in self.buckets) // self.world
        kinds = {b.dtype for b in self.buckets}
        self.parts = {k: torch.empty((self.world - 1) * largest, dtype=k, device=self.device) for k in kinds}
        sizes = [b.padded // unit for b in self.buckets]
        self.squares = torch.zeros(sum(sizes), device=self.device)  # of this process's parts' sums
        for b, squares in zip(self.buckets, self.squares.split(sizes)):
            b.squares = squares

    def _connect(self):
        self.handle = _symmetric_handle(self.memory)
        views = iter([[self.handle.get_buffer(r, (n,), *at) for r in range(self.world)] for n, *at in self.places])
        for b in self.buckets:
            b.flats, b.results = next(views), next(views)  # what comes back: sums, or weights
            result = b.results[self.rank].zero_()
            b.lay(b.flats[self.rank].zero_(), floats(result, b.padded // self.world) if b.split else result)
        if self.stream:
            torch.cuda.synchronize()

    def _try(self):
        """Of each kind the smallest bucket, against an all-reduce."""
        fine, tried = True, {(b.dtype, b.split): b for b in sorted(self.buckets, key=lambda b: -b.size)}.values()
        for b in tried:
            numbers = torch.arange(b.padded, dtype=torch.int32, device=b.flat.device)
            b.flat.copy_((numbers % 251 - 125) * (self.rank + 1))
            expected = b.flat.to(torch.float32, copy=True)
            dist.all_reduce(expected)
            self._add_up(b)
            self.wait()
            if b.split:
                fine &= torch.allclose(b.sums, expected[b.mine])
                b.results[self.rank][b.mine] = b.sums
                self.spread(b)
                self.wait()
            fine &= torch.allclose(b.results[self.rank].float(), expected, rtol=0.01)
        fine = agreed(fine, self.device)  # after which nobody reads these any more
        for b in tried:
            b.flat.zero_(), b.results[self.rank].zero_()
        if not fine:
            raise RuntimeError("what was copied from the other GPUs' memory adds up to something else")

    def _house_copies(self):
        """The split weights' bf16 copies move to where other processes reach them."""
        for b in self.buckets:
            if b.split:
                for p, view in zip(b.parameters, b.views_of(b.results[self.rank], b.parameters)):
                    p.copy_bf16.data = view.copy_(p.copy_bf16)

    def _barrier(self):
        self.handle.barrier(0, self.TIMEOUT_MS)

    def send(self, bucket: Bucket):
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.kept += bucket.fill()
            self._add_up(bucket)

    def _add_up(self, bucket: Bucket):
        n, others = bucket.padded // self.world, self._others()
        parts, sums = self.parts[bucket.dtype], bucket.sums if bucket.split else bucket.sums[bucket.mine]
        self._barrier()  # all have filled theirs
        for i, other in enumerate(others):
            parts[i * n : (i + 1) * n].copy_(bucket.flats[other][bucket.mine])
        kernels._add_parts[(n // self.BLOCK,)](
            bucket.flat[bucket.mine], parts, sums, bucket.squares, n, P=self.world - 1, BLOCK=self.BLOCK
        )
        if not bucket.split:
            self._collect(bucket)

    def _others(self) -> list[int]:
        """Each process begins with another."""
        return [(self.rank + i) % self.world for i in range(1, self.world)]

    def _collect(self, bucket: Bucket):
        """The other parts' results. Between a read of others' memory and the next write to it lies a norm(), for which
        all must have come so far."""
        n = bucket.padded // self.world
        self._barrier()  # all have made theirs
        for other in self._others():
            theirs = slice(other * n, (other + 1) * n)
            bucket.results[self.rank][theirs].copy_(bucket.results[other][theirs])

    def spread(self, bucket: Bucket):
        """The weights of a split bucket, of which this process has just updated its part."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._collect(bucket)

    def shares(self):
        """What this process updates, in that order: a bucket to spread() afterwards or None, and pairs of a weight with
        the beginning and size of what is meant of it, in the order of memory, and of the sums of its gradients."""
        whole = [b for b in self.buckets if not b.split]
        yield None, [(part, view) for b in whole for part, view in zip(whole_of(b.parameters), b.sum_views)]
        for b in self.buckets:
            if b.split:
                parts, first, end = [], b.mine.start, b.mine.stop
                for p, start in zip(b.parameters, b.starts):
                    begin, stop = max(start, first), min(start + p.numel(), end)
                    if begin < stop:
                        parts.append(((p, begin - start, stop - begin), b.sums[begin - first : stop - first]))
                yield b, parts

    def complete(self, bucket: Bucket, tensors_of):
        """Of a split bucket's weights, all parts of each of their fp32 tensors_of(weight), which lie as they do."""
        for tensors in zip(*map(tensors_of, bucket.parameters)):
            flat = floats(bucket.flat, bucket.padded)
            views = bucket.views_of(flat, tensors)
            torch._foreach_copy_(views, list(tensors))
            dist.all_gather(list(flat.chunk(self.world)), flat[bucket.mine].clone())
            torch._foreach_copy_(list(tensors), views)

    def wait(self):
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.kept.clear()  # not before, as another stream reads them

    def norm(self) -> torch.Tensor:
        """Of all sums together, fp32."""
        total = self.squares.sum()
        dist.all_reduce(total)
        return total.sqrt()

    def reset(self):
        self.kept.clear()


def agreed(fine: bool, device: torch.device) -> bool:
    """Whether that is so in all processes."""
    fine = torch.tensor(int(fine), device=device)
    dist.all_reduce(fine, dist.ReduceOp.MIN)
    return bool(fine)


class SharedGradients:
    """Gradients added up over processes while the backward pass still runs, as DistributedDataParallel does, but also
    within a CUDA graph and of bf16 copies, which that cannot.

    All processes start with the first one's weights. In a step's last backward pass (`last` is set before it), each
    bucket of weights is sent as soon as all its gradients are there; finish() waits for the sums. These are in fp32;
    with `dtype` bf16, what is sent is rounded, which halves the traffic, and so are sums that travel. Buckets follow
    the order in which the first pass finds the gradients, as the time projections of all blocks, being one product,
    come last.

    After finish(), shares() is what this process updates, and `sums` are of the gradients of that.
    """

    @torch.no_grad()
    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, half=(), copies: bool = True):
        """half: the weights that will have bf16 copies. copies: by PeerCopies where that is possible."""
        self.parameters, self.dtype, self.last, self.copies = parameters, dtype, True, copies
        self.buckets, self.order, self.way, self.sums = [], {}, None, []
        self.half = set(half)
        for p in parameters:
            dist.broadcast(p.data, 0)
            if p not in self.half:  # whose hook would be called too, though nothing is accumulated; see _Half
                p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p: nn.Parameter):
        """The pass has come to its gradient."""
        if not self.last:
            return
        if not self.buckets:
            self.order[p] = None
            return
        bucket = self.bucket_of[p]
        bucket.missing -= 1
        if not bucket.missing:
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: Bucket):
        bucket.missing = len(bucket.parameters)
        self.way.send(bucket)

    def reset(self):
        """After a pass that broke off."""
        if self.way:
            self.way.reset()
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def finish(self):
        """After a step's last backward pass."""
        if not self.buckets:
            check_all_trained(self.parameters)
            place = {p: i for i, p in enumerate(self.parameters)}
            order = torch.tensor([place[p] for p in self.order], device=self.parameters[0].device)
            dist.broadcast(order, 0)  # all send the same
            self._choose_way([self.parameters[i] for i in order.tolist()])
            self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
            self.sums = [sums for _, parts in self.way.shares() for _, sums in parts]
            for bucket in self.buckets:
                self._send(bucket)
        self.way.wait()

    def shares(self):
        """As PeerCopies.shares(), without the sums."""
        return [(bucket, [part for part, _ in parts]) for bucket, parts in self.way.shares()]

    @torch.no_grad()
    def _choose_way(self, order: list[nn.Parameter]):
        device = order[0].device
        if agreed(self.copies and PeerCopies.possible(device), device):
            rounded = self.dtype == torch.bfloat16
            sent = (lambda p: self.dtype) if rounded else (lambda p: gradient_of(p).dtype)
            self.buckets = self._cut(order, lambda p: (sent(p), p in self.half), PeerCopies.BUCKET)
            self.way = PeerCopies.made(self.buckets, self.dtype)
        if self.way is None:
            self.buckets = self._cut(order, lambda p: (self.dtype,), AllReduce.BUCKET)
            self.way = AllReduce(self.buckets)

    @staticmethod
    def _cut(order: list[nn.Parameter], kind_of, size: int) -> list[Bucket]:
        """Buckets of one kind each (dtype, split), somewhat larger than `size`, in the order in which they are full."""
        full, begun = [], {}
        for p in order:
            kind = kind_of(p)
            part = begun.setdefault(kind, [])
            part.append(p)
            if sum(q.numel() for q in part) > size:
                full.append((begun.pop(kind), kind))
        return [Bucket(part, *kind) for part, kind in full + [(part, kind) for kind, part in begun.items()]]
