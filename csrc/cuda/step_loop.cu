// A captured step, repeated on the device until there is nothing left to do: a conditional `while` node
// (CUDA 12.4) around it. Free of torch: the caller hands over a graph, pointers and a stream.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 32;

// What ends a loop.
struct Ends {
  const int64_t* cursor;          // steps so far, counted by the step itself
  const int64_t* bounds;          // how many at most, and the number of this launch
  const int64_t* stopped;         // on the host: the number of the last launch that is to stop
  const unsigned char* finished;  // by slot
  int slots;
};

__global__ void __launch_bounds__(kThreads) decide(cudaGraphConditionalHandle loop, Ends ends) {
  bool live = false;
  for (int slot = threadIdx.x; slot < ends.slots; slot += kThreads) live |= ends.finished[slot] == 0;
  live = __any_sync(0xffffffffu, live);
  if (threadIdx.x != 0) return;
  // Volatile: the host writes it while the loop runs.
  const int64_t stopped = *static_cast<const volatile int64_t*>(ends.stopped);
  cudaGraphSetConditional(loop, live && *ends.cursor < ends.bounds[0] && stopped < ends.bounds[1]);
}

cudaError_t add(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after,
                cudaGraphNodeParams* params) {
  const size_t count = after ? 1 : 0;
#if CUDART_VERSION >= 13000
  return cudaGraphAddNode(node, graph, after, nullptr, count, params);
#else
  return cudaGraphAddNode(node, graph, after, count, params);
#endif
}

cudaError_t add_decision(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after,
                         cudaGraphConditionalHandle loop, Ends ends) {
  void* arguments[] = {&loop, &ends};
  cudaGraphNodeParams params = {};
  params.type = cudaGraphNodeTypeKernel;
  params.kernel.func = reinterpret_cast<void*>(decide);
  params.kernel.gridDim = dim3(1);
  params.kernel.blockDim = dim3(kThreads);
  params.kernel.kernelParams = arguments;
  return add(node, graph, after, &params);
}

// decide → while (decided) { step → decide }
cudaError_t build(cudaGraph_t graph, cudaGraph_t step, Ends ends) {
  cudaGraphConditionalHandle loop;
  cudaError_t error = cudaGraphConditionalHandleCreate(&loop, graph, 0, cudaGraphCondAssignDefault);
  if (error != cudaSuccess) return error;
  cudaGraphNode_t first, repeat, body, last;
  if ((error = add_decision(&first, graph, nullptr, loop, ends)) != cudaSuccess) return error;
  cudaGraphNodeParams params = {};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = loop;
  params.conditional.type = cudaGraphCondTypeWhile;
  params.conditional.size = 1;
  if ((error = add(&repeat, graph, &first, &params)) != cudaSuccess) return error;
  cudaGraph_t inside = params.conditional.phGraph_out[0];
  if ((error = cudaGraphAddChildGraphNode(&body, inside, nullptr, 0, step)) != cudaSuccess) return error;
  return add_decision(&last, inside, &body, loop, ends);
}

}  // namespace

extern "C" {

// Makes `*loop` of a captured step, which it copies; what the step reads and writes must outlive it.
int blockpilot_loop_create(void* step, const int64_t* cursor, const int64_t* bounds, const int64_t* stopped,
                           const unsigned char* finished, int slots, void** loop) {
  cudaGraph_t graph;
  cudaError_t error = cudaGraphCreate(&graph, 0);
  if (error != cudaSuccess) return error;
  error = build(graph, static_cast<cudaGraph_t>(step), {cursor, bounds, stopped, finished, slots});
  cudaGraphExec_t made = nullptr;
  if (error == cudaSuccess) error = cudaGraphInstantiate(&made, graph, 0);
  cudaGraphDestroy(graph);
  *loop = made;
  return error;
}

int blockpilot_loop_launch(void* loop, void* stream) {
  return cudaGraphLaunch(static_cast<cudaGraphExec_t>(loop), static_cast<cudaStream_t>(stream));
}

int blockpilot_loop_destroy(void* loop) { return cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(loop)); }

const char* blockpilot_loop_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

}  // extern "C"
