/* The peer of `lockstep bench allreduce`: MPI_Allreduce in place on freshly written floats.
 *
 *   mpicc -O2 allreduce_mpi.c -o allreduce_mpi
 *   mpirun -np 2 ./allreduce_mpi 4096:100:1000000 1048576:20:1000000
 *
 * Each argument is bytes:repetitions:microseconds; there are fewer repetitions (but at least five)
 * when they would take longer than that. Rank 0 prints "bytes microseconds" per repetition. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static void fill(float* data, long count, int rank) {
  for (long i = 0; i < count; ++i) data[i] = (float)((i % 5) + rank);
}

static int is_right(const float* data, long count, int size) {
  const float ranks = (float)(size * (size - 1) / 2);
  for (long i = 0; i < count; ++i)
    if (data[i] != (float)(i % 5) * (float)size + ranks) return 0;
  return 1;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (int a = 1; a < argc; ++a) {
    long bytes = 0, repetitions = 0, budget_us = 0;
    if (sscanf(argv[a], "%ld:%ld:%ld", &bytes, &repetitions, &budget_us) != 3) return 2;
    const long count = bytes / 4;
    float* data = malloc((size_t)bytes);
    double began = MPI_Wtime();
    for (long i = -3; i < repetitions; ++i) {
      if (i == 0) { /* the warm-up shows how many fit; rank 0 decides */
        const double fitting = budget_us * 1e-6 / ((MPI_Wtime() - began) / 3 + 1e-9);
        if (fitting < (double)repetitions) repetitions = fitting < 5 ? 5 : (long)fitting;
        MPI_Bcast(&repetitions, 1, MPI_LONG, 0, MPI_COMM_WORLD);
      }
      fill(data, count, rank);
      if (bytes >= 65536) MPI_Barrier(MPI_COMM_WORLD);
      const double start = MPI_Wtime();
      MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      const double end = MPI_Wtime();
      if (i == -3 && !is_right(data, count, size)) {
        fprintf(stderr, "rank %d: MPI_Allreduce of %ld bytes is wrong\n", rank, bytes);
        MPI_Abort(MPI_COMM_WORLD, 1);
      }
      if (rank == 0 && i >= 0) printf("%ld %.3f\n", bytes, (end - start) * 1e6);
    }
    free(data);
  }
  MPI_Finalize();
  return 0;
}
