/* A CUDA runtime in host memory: what torch's own CUDA code asks for, without a GPU.

   Memory is reserved and never touched, kernels and cuBLAS do nothing, streams and events are done
   at once. So torch allocates, frees and saves as on a GPU, and computes nothing. Addresses rise
   with each segment, and none is used again. Preloaded, it stands before libcudart, libcublas,
   libcudnn's recurrent networks and the driver. SOFTWARE_CUDA_MAJOR is the architecture, 8 (A100)
   unless it is set.

   Of recurrent networks the sizes are cuDNN's, as an H200 told them, and weights lie as there:
   all matrices of a layer and direction after those of the one before, then all biases. A call
   with dropout counts in the dropout's state and writes the count into its reserve: so much shows
   which masks a backward gets (`software_masks`).

   Functions take any arguments, as in C without a prototype, and return 0: success. */

#include <driver_types.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DONE(name) int name() { return 0; }
#define MAKES(name) int name(void** made) { *made = malloc(4096); return 0; }
#define GIVES(name, value) int name(int* given) { *given = value; return 0; }

static const size_t total = 80ull << 30;
static char* next = (char*)(64ull << 40);
static size_t used;

int cudaMalloc(void** address, size_t size) {
  if (used + size > total) return cudaErrorMemoryAllocation;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  *address = mmap(next, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (*address != next) return cudaErrorMemoryAllocation;
  next += size;
  used += size;
  return 0;
}

/* a segment that is given back was never touched: the host has lost no memory to it */
DONE(cudaFree)

int cudaMemGetInfo(size_t* left, size_t* all) {
  *all = total;
  *left = total - used;
  return 0;
}

int cudaGetDeviceProperties(struct cudaDeviceProp* device, int index) {
  const char* major = getenv("SOFTWARE_CUDA_MAJOR");
  memset(device, 0, sizeof *device);
  strcpy(device->name, "software");
  device->totalGlobalMem = total;
  device->major = major ? atoi(major) : 8;
  device->multiProcessorCount = 108;
  device->warpSize = 32;
  device->maxThreadsPerBlock = 1024;
  device->maxThreadsPerMultiProcessor = 2048;
  device->maxThreadsDim[0] = device->maxThreadsDim[1] = 1024;
  device->maxThreadsDim[2] = 64;
  device->maxGridSize[0] = 2147483647;
  device->maxGridSize[1] = device->maxGridSize[2] = 65535;
  device->sharedMemPerBlock = 48 << 10;
  device->sharedMemPerBlockOptin = 163 << 10;
  device->sharedMemPerMultiprocessor = 164 << 10;
  device->regsPerBlock = 65536;
  device->l2CacheSize = 40 << 20;
  return 0;
}

int cudaFuncGetAttributes(struct cudaFuncAttributes* kernel, const void* function) {
  memset(kernel, 0, sizeof *kernel);
  kernel->maxThreadsPerBlock = 1024;
  kernel->numRegs = 32;
  kernel->binaryVersion = kernel->ptxVersion = 80;
  return 0;
}

int cudaPointerGetAttributes(struct cudaPointerAttributes* pointer, const void* address) {
  memset(pointer, 0, sizeof *pointer);
  return 0;
}

int cudaMemcpy(void* to, const void* from, size_t size) {
  memcpy(to, from, size);
  return 0;
}

int cudaMemcpyAsync(void* to, const void* from, size_t size) {
  return cudaMemcpy(to, from, size);
}

int cudaStreamIsCapturing(void* stream, int* status) {
  *status = 0;
  return 0;
}

int cudaStreamGetCaptureInfo(void* stream, int* status) {
  return cudaStreamIsCapturing(stream, status);
}

int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return 0;
}

int cudaDeviceGetPCIBusId(char* text) {
  strcpy(text, "0000:00:00.0");
  return 0;
}

int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                     unsigned long long flags, int* result) {
  *function = 0;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

int cublasGetMathMode(void* handle, int* mode) {
  *mode = 0;
  return 0;
}

int cublasGetPointerMode_v2(void* handle, int* mode) {
  return cublasGetMathMode(handle, mode);
}

int cublasLtMatmulAlgoGetHeuristic(void* handle, void* operation, void* a, void* b, void* c,
                                   void* d, void* preference, int wanted, void* found, int* count) {
  *count = 1;
  return 0;
}

typedef struct {
  float rate;
  unsigned long long* states;
} Dropout;

/* gates and bytes of a number; sizes as torch gives them */
typedef struct {
  int mode, directions, type, size, inputs, hidden, projected, layers;
  Dropout* dropout;
} Recurrent;

typedef struct {
  int tokens;
} Sequences;

/* what `cudnnGetTensorNdDescriptor` tells of a matrix or a bias */
typedef struct {
  int type, rows, columns;
} Matrix;

int cudnnDropoutGetStatesSize(void* handle, size_t* size) {
  *size = 108 * 2048 * 24;
  return 0;
}

int cudnnRestoreDropoutDescriptor(Dropout* dropout, void* handle, float rate, void* states) {
  dropout->rate = rate;
  dropout->states = states;
  return 0;
}

int cudnnSetDropoutDescriptor(Dropout* dropout, void* handle, float rate, void* states,
                              size_t size, unsigned long long seed) {
  if (states) *(unsigned long long*)states = seed << 8;
  return cudnnRestoreDropoutDescriptor(dropout, handle, rate, states);
}

int cudnnSetRNNDescriptor_v8(Recurrent* made, int algorithm, int mode, int biases, int direction,
                             int input_mode, int type, int precision, int math, int inputs,
                             int hidden, int projected, int layers, Dropout* dropout) {
  int size = type == 1 ? 8 : type == 0 ? 4 : 2;
  Recurrent given = {mode, 1 + direction, type, size, inputs, hidden, projected, layers, dropout};
  *made = given;
  return 0;
}

int cudnnSetRNNDataDescriptor(Sequences* made, int type, int layout, int most, int batch, int width,
                              const int* lengths) {
  made->tokens = 0;
  for (int n = 0; n < batch; n++) made->tokens += lengths[n];
  return 0;
}

static int gates(Recurrent* of) { return of->mode == 2 ? 4 : of->mode == 3 ? 3 : 1; }

static long outputs(Recurrent* of) {
  return of->projected && of->projected != of->hidden ? of->projected : of->hidden;
}

static long is_projected(Recurrent* of) { return outputs(of) != of->hidden; }

static long columns(Recurrent* of, int layer) {
  return layer < of->directions ? of->inputs : of->directions * outputs(of);
}

/* numbers in the matrices of a layer and direction */
static long matrices(Recurrent* of, int layer) {
  long into = gates(of) * of->hidden * (columns(of, layer) + outputs(of));
  return into + is_projected(of) * of->hidden * outputs(of);
}

static long all_matrices(Recurrent* of, int before) {
  long sum = 0;
  for (int layer = 0; layer < before; layer++) sum += matrices(of, layer);
  return sum;
}

int cudnnGetRNNWeightSpaceSize(void* handle, Recurrent* of, size_t* size) {
  int layers = of->layers * of->directions;
  *size = (all_matrices(of, layers) + 2l * layers * gates(of) * of->hidden) * of->size;
  return 0;
}

int cudnnGetRNNWeightParams(void* handle, Recurrent* of, int layer, size_t bytes, char* weights,
                            int id, Matrix* matrix, char** place, Matrix* bias, char** bias_place) {
  int count = gates(of), layers = of->layers * of->directions;
  long into = of->hidden * columns(of, layer), within = of->hidden * outputs(of);
  if (matrix) {
    long before = id < count ? id * into : count * into + (id - count) * within;
    Matrix whole = {of->type, of->hidden, id < count ? columns(of, layer) : outputs(of)};
    *matrix = whole;
    *place = weights + (all_matrices(of, layer) + before) * of->size;
  }
  if (bias) {
    Matrix whole = {of->type, of->hidden, 1};
    *bias = whole;
    long before = all_matrices(of, layers) + (2l * layer * count + id) * of->hidden;
    *bias_place = weights + before * of->size;
  }
  return 0;
}

int cudnnGetTensorNdDescriptor(Matrix* of, int most, int* type, int* dimensions, int* sizes) {
  *type = of->type;
  *dimensions = 3;
  sizes[0] = 1;
  sizes[1] = of->rows;
  sizes[2] = of->columns;
  return 0;
}

int cudnnGetRNNTempSpaceSizes(void* handle, Recurrent* of, int trains, Sequences* x, size_t* work,
                              size_t* reserve) {
  long numbers = (long)x->tokens * of->directions * of->hidden, between = of->layers - 1;
  long kept[] = {numbers * of->layers * (gates(of) + 1) * of->size, numbers * between * of->size,
                 of->dropout->rate > 0 ? (numbers * between + 7) / 8 : 0};
  if (work) *work = 1 << 20;
  if (!reserve) return 0;
  /* of a GRU more than zoo estimates, which shows that it is asked */
  *reserve = of->mode == 3 ? 4096 : 256;
  for (int part = 0; part < 3; part++) *reserve += (kept[part] + 31) / 32 * 32;
  return 0;
}

static unsigned long long masks[4096];
static int mask_count;

/* the counts that backwards found in their reserves, each time that this is called */
int software_masks(unsigned long long** found) {
  int count = mask_count;
  *found = masks;
  mask_count = 0;
  return count;
}

int cudnnRNNForward(void* handle, Recurrent* of, int trains, void* lengths, Sequences* x,
                    void* input, void* y, void* output, void* h, void* hx, void* hy, void* c,
                    void* cx, void* cy, size_t weight_bytes, void* weights, size_t work_bytes,
                    void* work, size_t bytes, unsigned long long* reserve) {
  if (trains) *reserve = of->dropout->rate > 0 ? ++*of->dropout->states : 0;
  return 0;
}

int cudnnRNNBackwardData_v8(void* handle, Recurrent* of, void* lengths, void* y, void* output,
                            void* dy, void* x, void* dx, void* h, void* hx, void* dhy, void* dhx,
                            void* c, void* cx, void* dcy, void* dcx, size_t weight_bytes,
                            void* weights, size_t work_bytes, void* work, size_t bytes,
                            unsigned long long* reserve) {
  if (mask_count < 4096) masks[mask_count++] = *reserve;
  return 0;
}

GIVES(cudaGetDeviceCount, 1)
GIVES(cudaGetDevice, 0)
GIVES(cudaDriverGetVersion, 13000)
GIVES(cudaRuntimeGetVersion, 13000)
GIVES(cudaDeviceGetAttribute, 0)
GIVES(cudaDeviceCanAccessPeer, 0)
GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2)
GIVES(cuDeviceGet, 0)
MAKES(__cudaGetKernel)
MAKES(cudaGetSymbolAddress)
MAKES(cudaHostAlloc)
MAKES(cudaStreamCreateWithPriority)
MAKES(cudaEventCreate)
MAKES(cudaEventCreateWithFlags)
MAKES(cuCtxGetCurrent)
MAKES(cublasCreate_v2)
MAKES(cublasLtMatmulDescCreate)
MAKES(cublasLtMatmulPreferenceCreate)
MAKES(cublasLtMatrixLayoutCreate)
MAKES(cudnnCreate)
MAKES(cudnnCreateDropoutDescriptor)
MAKES(cudnnCreateRNNDataDescriptor)
MAKES(cudnnCreateRNNDescriptor)
MAKES(cudnnCreateTensorDescriptor)
DONE(__cudaLaunchKernel)
DONE(cudaDeviceSynchronize)
DONE(cudaEventDestroy)
DONE(cudaEventQuery)
DONE(cudaEventRecord)
DONE(cudaEventRecordWithFlags)
DONE(cudaEventSynchronize)
DONE(cudaFreeHost)
DONE(cudaFuncSetAttribute)
DONE(cudaGetLastError)
DONE(cudaLaunchKernel)
DONE(cudaLaunchKernelExC)
DONE(cudaMemsetAsync)
DONE(cudaPeekAtLastError)
DONE(cudaSetDevice)
DONE(cudaStreamQuery)
DONE(cudaStreamSynchronize)
DONE(cudaStreamWaitEvent)
DONE(cudaThreadExchangeStreamCaptureMode)
DONE(cuInit)
DONE(cuCtxSetCurrent)
DONE(cublasDestroy_v2)
DONE(cublasGemmEx)
DONE(cublasGemmStridedBatchedEx)
DONE(cublasLtMatmul)
DONE(cublasLtMatmulDescDestroy)
DONE(cublasLtMatmulDescSetAttribute)
DONE(cublasLtMatmulPreferenceDestroy)
DONE(cublasLtMatmulPreferenceSetAttribute)
DONE(cublasLtMatrixLayoutDestroy)
DONE(cublasLtMatrixLayoutSetAttribute)
DONE(cublasSetMathMode)
DONE(cublasSetPointerMode_v2)
DONE(cublasSetStream_v2)
DONE(cublasSetWorkspace_v2)
DONE(cublasSgemmStridedBatched)
DONE(cublasSgemm_v2)
DONE(cublasSgemv_v2)
DONE(cudnnDestroyDropoutDescriptor)
DONE(cudnnDestroyRNNDataDescriptor)
DONE(cudnnDestroyRNNDescriptor)
DONE(cudnnDestroyTensorDescriptor)
DONE(cudnnRNNBackwardWeights_v8)
DONE(cudnnSetStream)
DONE(cudnnSetTensorNdDescriptor)
