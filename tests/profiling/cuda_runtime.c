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
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector_types.h>

#define DONE(name) int name() { return 0; }
#define MAKES(name) int name(void** made) { *made = calloc(1, 4096); return 0; }
#define GIVES(name, value) int name(int* given) { *given = value; return 0; }

static const size_t total = 80ull << 30;
static char* next = (char*)(64ull << 40);
static char* next_pinned = (char*)(96ull << 40);
static size_t used;

/* Capture. A kernel, a product of cuBLAS, a copy or a fill in a captured stream becomes a node, and
   runs with each launch of the graph. One capture at a time. What CUDA refuses is refused: the call
   returns the error, and the capture is of no use from then on. */

struct node { const void* function; void* to; const void* from; size_t size; };
struct graph { size_t count, kernels, copies; struct node* nodes; };
/* where a handle points: a stream and a handle of cuBLAS or cuDNN, which has one; and an event */
struct stream { unsigned long long id; size_t work, joined; int blocking; struct stream* own; };
struct event { unsigned long long id; struct stream* of; size_t work; int recorded; };

static struct {
  int status, mode, loose;
  unsigned long long id;
  pthread_t thread;
  struct stream* origin;
  struct graph* graph;
} capture;
static __thread int thread_mode = cudaStreamCaptureModeGlobal, last;
/* kernels and copies so far: launched one by one, recorded by captures, launched by graphs */
size_t software_kernels[3], software_copies[3];

static int failed(int error) { return last = error; }

static int refused(int error) {
  if (capture.status) capture.status = cudaStreamCaptureStatusInvalidated;
  return failed(error);
}

static int is_captured(struct stream* stream) {
  /* 0, 1 and 2 are default streams */
  return capture.status && (size_t)stream > 2 && stream->id == capture.id;
}

/* what a thread may not call while it, or any thread, captures in a strict mode */
static int unsafe() {
  if (!capture.status || thread_mode == cudaStreamCaptureModeRelaxed) return 0;
  int own = pthread_equal(capture.thread, pthread_self());
  int strict = own ? capture.mode != cudaStreamCaptureModeRelaxed
                   : thread_mode + capture.mode == cudaStreamCaptureModeGlobal;
  return strict ? refused(cudaErrorStreamCaptureUnsupported) : 0;
}

/* returns -1 where the work is to be done now */
static int record(struct stream* stream, struct node node) {
  if (!is_captured(stream)) {
    int waits = capture.status && (size_t)stream < 2 && capture.origin->blocking;
    if (waits) return refused(cudaErrorStreamCaptureImplicit);
    software_kernels[0] += node.function != 0;
    software_copies[0] += node.from != 0;
    return -1;
  }
  if (capture.status != cudaStreamCaptureStatusActive)
    return failed(cudaErrorStreamCaptureInvalidated);
  struct graph* graph = capture.graph;
  graph->nodes = realloc(graph->nodes, (graph->count + 1) * sizeof node);
  graph->nodes[graph->count++] = node;
  graph->kernels += node.function != 0;
  graph->copies += node.from != 0;
  software_kernels[1] += node.function != 0;
  software_copies[1] += node.from != 0;
  capture.loose += stream != capture.origin && stream->work == stream->joined;
  stream->work++;
  return 0;
}

/* Kernels of dropout, by their names, and what they were launched with: whether in a capture, and
   the seed and the offset of random numbers, or in a capture where a replay finds these, and the
   offset within the graph. */
static const void* dropouts[4096];
static int dropout_count;
struct draw { unsigned long long captured, seed, offset, within; };
static struct draw draws[4096];
static int draw_count;

int __cudaRegisterFunction(void** binary, const void* function, char* device, const char* name) {
  if (strstr(name, "fused_dropout_kernel") && dropout_count < 4096)
    dropouts[dropout_count++] = function;
  return 0;
}

int __cudaGetKernel(const void** made, const void* function) {
  *made = function;
  return 0;
}

/* those since the last time that this was called */
int software_draws(struct draw** found) {
  int count = draw_count;
  *found = draws;
  draw_count = 0;
  return count;
}

static void note_draw(const void* function, void** args) {
  for (int i = 0; i < dropout_count; i++) {
    if (dropouts[i] != function || draw_count == 4096) continue;
    /* at::PhiloxCudaState, after three tensors, a count and a rate */
    struct { unsigned long long seed, offset, within; unsigned char captured; }* state = args[5];
    struct draw made = {state->captured, state->seed, state->offset, state->within};
    draws[draw_count++] = made;
  }
}

static int launch(const void* function, struct stream* stream) {
  int error = record(stream, (struct node){function ? function : (void*)1});
  return error < 0 ? 0 : error;
}

int cudaStreamBeginCapture(struct stream* stream, int mode) {
  if ((size_t)stream < 2 || capture.status) return failed(cudaErrorStreamCaptureUnsupported);
  capture.status = cudaStreamCaptureStatusActive;
  capture.mode = mode;
  capture.thread = pthread_self();
  capture.origin = stream;
  capture.graph = calloc(1, sizeof *capture.graph);
  capture.loose = 0;
  stream->id = ++capture.id;
  return 0;
}

int cudaStreamEndCapture(struct stream* stream, struct graph** graph) {
  *graph = 0;
  if (!capture.status || stream != capture.origin) return failed(cudaErrorIllegalState);
  int error = capture.status != cudaStreamCaptureStatusActive ? cudaErrorStreamCaptureInvalidated
            : capture.loose ? cudaErrorStreamCaptureUnjoined
            : capture.mode != cudaStreamCaptureModeRelaxed
              && !pthread_equal(capture.thread, pthread_self()) ? cudaErrorStreamCaptureWrongThread
            : 0;
  capture.status = 0;
  if (!error) *graph = capture.graph;
  return error ? failed(error) : 0;
}

int cudaStreamGetCaptureInfo(struct stream* stream, int* status, unsigned long long* id,
                             struct graph** graph, void*** before, void** edges, size_t* count) {
  if (capture.status && (size_t)stream < 2 && capture.origin->blocking)
    return refused(cudaErrorStreamCaptureImplicit);
  *status = is_captured(stream) ? capture.status : 0;
  if (*status && id) *id = capture.id;
  if (*status && graph) *graph = capture.graph;
  if (*status && before) *before = 0;
  if (*status && count) *count = 0;
  return 0;
}

int cudaStreamIsCapturing(struct stream* stream, int* status) {
  return cudaStreamGetCaptureInfo(stream, status, 0, 0, 0, 0, 0);
}

int cudaThreadExchangeStreamCaptureMode(int* mode) {
  int before = thread_mode;
  thread_mode = *mode;
  *mode = before;
  return 0;
}

int cudaGraphGetNodes(struct graph* graph, struct node** nodes, size_t* count) {
  for (size_t i = 0; nodes && i < *count; i++) nodes[i] = graph->nodes + i;
  *count = graph->count;
  return 0;
}

int cudaGraphInstantiateWithFlags(struct graph** made, struct graph* graph) {
  *made = malloc(sizeof **made);
  **made = *graph;
  (*made)->nodes = malloc(graph->count * sizeof *graph->nodes + 1);
  memcpy((*made)->nodes, graph->nodes, graph->count * sizeof *graph->nodes);
  return 0;
}

int cudaGraphLaunch(struct graph* graph, struct stream* stream) {
  if (is_captured(stream)) return refused(cudaErrorStreamCaptureUnsupported);
  software_kernels[2] += graph->kernels;
  software_copies[2] += graph->copies;
  for (struct node* node = graph->nodes; node < graph->nodes + graph->count; node++)
    if (node->from) memcpy(node->to, node->from, node->size);
  return 0;
}

int cudaGraphDestroy(struct graph* graph) {
  free(graph->nodes);
  free(graph);
  return 0;
}

int cudaGraphExecDestroy(struct graph* graph) { return cudaGraphDestroy(graph); }

int cudaStreamCreateWithPriority(struct stream** made, unsigned flags) {
  *made = calloc(1, sizeof **made);
  (*made)->blocking = !(flags & cudaStreamNonBlocking);
  return 0;
}

int cudaStreamSynchronize(struct stream* stream) {
  if (is_captured(stream)) return refused(cudaErrorStreamCaptureUnsupported);
  return unsafe();
}

int cudaStreamQuery(struct stream* stream) { return cudaStreamSynchronize(stream); }

/* a device holds the stream that is captured, whatever the mode */
int cudaDeviceSynchronize() {
  return capture.status ? refused(cudaErrorStreamCaptureUnsupported) : 0;
}

int cudaEventRecord(struct event* event, struct stream* stream) {
  int is_one = is_captured(stream);
  if (is_one && capture.status != cudaStreamCaptureStatusActive)
    return failed(cudaErrorStreamCaptureInvalidated);
  *event = (struct event){is_one ? capture.id : 0, is_one ? stream : 0, is_one ? stream->work : 0, 1};
  return 0;
}

int cudaEventRecordWithFlags(struct event* event, struct stream* stream) {
  return cudaEventRecord(event, stream);
}

int cudaEventQuery(struct event* event) {
  if (event->id) return refused(cudaErrorCapturedEvent);
  return unsafe();
}

int cudaEventSynchronize(struct event* event) { return cudaEventQuery(event); }

int cudaEventElapsedTime(float* milliseconds, struct event* from, struct event* to) {
  *milliseconds = 0;
  return from->id || to->id ? refused(cudaErrorCapturedEvent) : unsafe();
}

int cudaStreamWaitEvent(struct stream* stream, struct event* event) {
  int is_one = is_captured(stream);
  if (!event->id) {
    /* work from before the capture, or from beside it */
    return is_one && event->recorded ? refused(cudaErrorStreamCaptureIsolation) : 0;
  }
  if (!capture.status || event->id != capture.id) return failed(cudaErrorCapturedEvent);
  if ((size_t)stream < 3) return refused(cudaErrorStreamCaptureImplicit);
  if (!is_one) stream->work = stream->joined = 0;
  stream->id = capture.id;
  struct stream* of = event->of;
  if (of != capture.origin && of != stream && of->work == event->work && of->work > of->joined) {
    of->joined = of->work;
    capture.loose--;
    /* what waits carries it on */
    capture.loose += stream != capture.origin && stream->work == stream->joined;
    stream->work += stream != capture.origin;
  }
  return 0;
}

int cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** args, size_t shared,
                     struct stream* stream) {
  note_draw(function, args);
  return launch(function, stream);
}

int __cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** args, size_t shared,
                       struct stream* stream) {
  note_draw(function, args);
  return launch(function, stream);
}

int cudaLaunchKernelExC(const cudaLaunchConfig_t* launched, const void* function) {
  return launch(function, (struct stream*)launched->stream);
}

int cudaMemsetAsync(void* to, int value, size_t size, struct stream* stream) {
  int error = record(stream, (struct node){0, to});
  return error < 0 ? 0 : error;
}

int cudaGetLastError() {
  int error = last;
  last = 0;
  return error;
}

int cudaPeekAtLastError() { return last; }

#define PRODUCT(name) int name(struct stream* handle) { return launch(name, handle->own) ? 13 : 0; }

int cublasSetStream_v2(struct stream* handle, struct stream* stream) {
  handle->own = stream;
  return 0;
}

int cudnnSetStream(struct stream* handle, struct stream* stream) {
  return cublasSetStream_v2(handle, stream);
}

int cublasLtMatmul(void* handle, void* operation, void* alpha, void* a, void* at, void* b, void* bt,
                   void* beta, void* c, void* ct, void* d, void* dt, void* how, void* workspace,
                   size_t size, struct stream* stream) {
  return launch(cublasLtMatmul, stream) ? 13 : 0;
}

int cudaMalloc(void** address, size_t size) {
  if (unsafe()) return last;
  if (used + size > total) return cudaErrorMemoryAllocation;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  *address = mmap(next, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (*address != next) return cudaErrorMemoryAllocation;
  next += size;
  used += size;
  return 0;
}

/* a segment that is given back was never touched: the host has lost no memory to it */
int cudaFree(void* address) { return unsafe(); }

int cudaHostAlloc(void** made, size_t size) {
  *made = 0;
  if (unsafe()) return last;
  *made = mmap(next_pinned, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  next_pinned = (char*)*made + (size + 4095) / 4096 * 4096;
  return 0;
}

int cudaFreeHost(void* address) { return unsafe(); }

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

int cudaDeviceGetAttribute(int* value, int attribute, int index) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 108; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 164 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
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
  pointer->type = (char*)address >= (char*)(96ull << 40) && (char*)address < next_pinned;
  return 0;
}

int cudaMemcpy(void* to, const void* from, size_t size) {
  if (unsafe()) return last;
  memcpy(to, from, size);
  return 0;
}

int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, struct stream* stream) {
  int error = record(stream, (struct node){0, to, from, size});
  if (error < 0) memcpy(to, from, size);
  return error < 0 ? 0 : error;
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

int cudnnRNNForward(struct stream* handle, Recurrent* of, int trains, void* lengths, Sequences* x,
                    void* input, void* y, void* output, void* h, void* hx, void* hy, void* c,
                    void* cx, void* cy, size_t weight_bytes, void* weights, size_t work_bytes,
                    void* work, size_t bytes, unsigned long long* reserve) {
  if (is_captured(handle->own)) return launch(cudnnRNNForward, handle->own) ? 13 : 0;
  if (trains) *reserve = of->dropout->rate > 0 ? ++*of->dropout->states : 0;
  return launch(cudnnRNNForward, handle->own) ? 13 : 0;
}

int cudnnRNNBackwardData_v8(struct stream* handle, Recurrent* of, void* lengths, void* y, void* output,
                            void* dy, void* x, void* dx, void* h, void* hx, void* dhy, void* dhx,
                            void* c, void* cx, void* dcy, void* dcx, size_t weight_bytes,
                            void* weights, size_t work_bytes, void* work, size_t bytes,
                            unsigned long long* reserve) {
  int captured = is_captured(handle->own);
  if (!captured && mask_count < 4096) masks[mask_count++] = *reserve;
  return launch(cudnnRNNBackwardData_v8, handle->own) ? 13 : 0;
}

GIVES(cudaGetDeviceCount, 1)
GIVES(cudaGetDevice, 0)
GIVES(cudaDriverGetVersion, 13000)
GIVES(cudaRuntimeGetVersion, 13000)
GIVES(cudaDeviceCanAccessPeer, 0)
GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 2)
GIVES(cuDeviceGet, 0)
MAKES(cudaGetSymbolAddress)
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
DONE(cudaEventDestroy)
DONE(cudaFuncSetAttribute)
DONE(cudaSetDevice)
DONE(cuInit)
DONE(cuCtxSetCurrent)
DONE(cublasDestroy_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
DONE(cublasLtMatmulDescDestroy)
DONE(cublasLtMatmulDescSetAttribute)
DONE(cublasLtMatmulPreferenceDestroy)
DONE(cublasLtMatmulPreferenceSetAttribute)
DONE(cublasLtMatrixLayoutDestroy)
DONE(cublasLtMatrixLayoutSetAttribute)
DONE(cublasSetMathMode)
DONE(cublasSetPointerMode_v2)
DONE(cublasSetWorkspace_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemv_v2)
DONE(cudnnDestroyDropoutDescriptor)
DONE(cudnnDestroyRNNDataDescriptor)
DONE(cudnnDestroyRNNDescriptor)
DONE(cudnnDestroyTensorDescriptor)
PRODUCT(cudnnRNNBackwardWeights_v8)
DONE(cudnnSetTensorNdDescriptor)
