/* A CUDA runtime in host memory: what torch's own CUDA code asks for, without a GPU.

   Memory is reserved and never touched, kernels and cuBLAS do nothing, streams and events are done
   at once. So torch allocates, frees and saves as on a GPU, and computes nothing. Addresses rise
   with each segment, and none is used again. Preloaded, it stands before libcudart, libcublas and
   the driver. SOFTWARE_CUDA_MAJOR is the architecture, 8 (A100) unless it is set.

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
