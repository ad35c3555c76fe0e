/* The part of the CANN runtime that torch_npu needs to manage tensors, on host memory.
 *
 * A device pointer is a host pointer, a copy is memcpy, every stream and event is already complete.
 * Symbols that only have to exist are appended by stubs.py as functions that return 0 (success).
 */
#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICES = 8, CORES = 24 };
static const size_t TOTAL_BYTES = (size_t)64 << 30;
static size_t used_bytes;
static __thread int32_t device;
static int context;

/* Devices: a rank of any local index finds its own; they share the host's memory. */
int aclrtGetDeviceCount(uint32_t *count) { *count = DEVICES; return 0; }
int aclrtSetDevice(int32_t index) { device = index; return 0; }
int aclrtGetDevice(int32_t *index) { *index = device; return 0; }
int aclrtGetCurrentContext(void **current) { *current = &context; return 0; }
int aclGetDeviceCapability(uint32_t index, int what, int64_t *value) { *value = CORES; return 0; }
int aclrtGetDeviceInfo(uint32_t index, int what, int64_t *value) { *value = CORES; return 0; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
const char *aclGetRecentErrMsg(void) { return "the emulator's CANN stubs know no error"; }

/* Memory */
static int allocate(void **pointer, size_t size) {
  *pointer = aligned_alloc(512, (size + 511) / 512 * 512 + 512);
  if (!*pointer) return 207001; /* ACL_ERROR_RT_MEMORY_ALLOCATION */
  __atomic_add_fetch(&used_bytes, malloc_usable_size(*pointer), __ATOMIC_RELAXED);
  return 0;
}
int aclrtMalloc(void **p, size_t size, int policy) { return allocate(p, size); }
int aclrtMallocAlign32(void **p, size_t size, int policy) { return allocate(p, size); }
int aclrtMallocHost(void **p, size_t size) { *p = malloc(size ? size : 1); return *p ? 0 : 1; }
int aclrtFree(void *p) {
  __atomic_sub_fetch(&used_bytes, malloc_usable_size(p), __ATOMIC_RELAXED);
  free(p);
  return 0;
}
int aclrtFreeHost(void *p) { free(p); return 0; }
int aclrtGetMemInfo(int kind, size_t *available, size_t *total) {
  *total = TOTAL_BYTES;
  *available = TOTAL_BYTES - __atomic_load_n(&used_bytes, __ATOMIC_RELAXED);
  return 0;
}
int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
  memcpy(to, from, size);
  return 0;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
  memcpy(to, from, size);
  return 0;
}
int aclrtMemset(void *to, size_t room, int value, size_t size) {
  memset(to, value, size);
  return 0;
}
int aclrtMemsetAsync(void *to, size_t room, int value, size_t size, void *stream) {
  memset(to, value, size);
  return 0;
}

/* Streams and events: handles that differ; whatever is asked is complete. */
static int new_handle(void **handle) { *handle = malloc(8); return *handle ? 0 : 1; }
static int drop_handle(void *handle) { free(handle); return 0; }
int aclrtCreateStream(void **s) { return new_handle(s); }
int aclrtCreateStreamWithConfig(void **s, uint32_t priority, uint32_t flags) { return new_handle(s); }
int aclrtDestroyStream(void *s) { return drop_handle(s); }
int aclrtStreamQuery(void *s, int *status) { *status = 1; return 0; }
int aclrtCreateEvent(void **e) { return new_handle(e); }
int aclrtCreateEventWithFlag(void **e, uint32_t flags) { return new_handle(e); }
int aclrtCreateEventExWithFlag(void **e, uint32_t flags) { return new_handle(e); }
int aclrtDestroyEvent(void *e) { return drop_handle(e); }
int aclrtQueryEventStatus(void *e, int *status) { *status = 1; return 0; }
int aclrtQueryEventWaitStatus(void *e, int *status) { *status = 1; return 0; }
int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 0; return 0; }

/* torch_npu refuses an empty compile option at initialisation. */
size_t aclGetCompileoptSize(int option) { return 16; }
int aclGetCompileopt(int option, char *value, size_t size) {
  strncpy(value, "disable", size);
  return 0;
}
