// A kernel without a race in which compute-sanitizer's racecheck reports one, as it does where Triton hands partitions
// over (docs/hopper.md). Half of a block meets at a barrier of its own, writes, and then all meet before it is read:
//
//     nvcc -arch=sm_90 -o racecheck_barriers tests/manual/racecheck_barriers.cu
//     compute-sanitizer --tool racecheck ./racecheck_barriers 0    # clean
//     compute-sanitizer --tool racecheck ./racecheck_barriers 5    # "Race reported between Read access … and Write"
//
// The argument is how often the half meets. Seen with the compute-sanitizer of CUDA 13.0 on an H200.
#include <cstdio>
#include <cstdlib>

__global__ void hand_over(int *out, int meetings) {
    __shared__ volatile unsigned char state[4];
    int thread = threadIdx.x;
    if (thread < 128) {
        for (int i = 0; i < meetings; i++) asm volatile("bar.sync 2, 128;" ::: "memory");
        state[thread % 4] = thread % 4;
        asm volatile("barrier.sync 1;" ::: "memory");
    } else {
        asm volatile("barrier.sync 1;" ::: "memory");
        out[blockIdx.x * 128 + thread - 128] = state[thread / 32 - 4];
    }
}

int main(int count, char **arguments) {
    int *out;
    cudaMalloc(&out, 132 * 128 * sizeof(int));
    hand_over<<<132, 256>>>(out, count > 1 ? atoi(arguments[1]) : 5);
    printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
    return 0;
}
