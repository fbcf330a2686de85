/*
 * cuda-sum [SECONDS | fault]: add numbers on every visible GPU, once or again and again for so many seconds, and print
 * the UUID of each GPU whose sums are right. With `fault`, the CUDA kernel writes to an unmapped address (Xid 31).
 * Only NVIDIA's real driver can run this: the CUDA kernel is PTX, which the driver compiles. It needs no CUDA headers:
 * the types and numbers are those of the driver API (cuda.h).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define COUNT 65536u
#define THREADS 256u
#define NOWHERE 0x7000000000ull

static const char ptx[] =
	".version 6.0\n.target sm_50\n.address_size 64\n"
	".visible .entry sum(.param .u64 from, .param .u64 to, .param .u32 count) {\n"
	"	.reg .pred end; .reg .b32 i, n, x, y, z; .reg .b64 a, b, offset;\n"
	"	ld.param.u64 a, [from]; ld.param.u64 b, [to]; ld.param.u32 n, [count];\n"
	"	mov.u32 x, %ctaid.x; mov.u32 y, %ntid.x; mov.u32 z, %tid.x; mad.lo.u32 i, x, y, z;\n"
	"	setp.ge.u32 end, i, n; @end ret;\n"
	"	mul.wide.u32 offset, i, 4; add.u64 a, a, offset; add.u64 b, b, offset;\n"
	"	ld.global.u32 x, [a]; ld.global.u32 y, [b]; add.u32 x, x, y; st.global.u32 [b], x;\n"
	"	ret;\n}\n";

static void *library;

/* Call a function of libcuda; every one returns 0 for success. */
#define CUDA(name, types, ...) check(#name, ((int (*) types)find(#name))(__VA_ARGS__))

static void *find(const char *name)
{
	void *function = dlsym(library, name);

	if (!function) {
		printf("%s: %s\n", name, dlerror());
		exit(1);
	}
	return function;
}

static void check(const char *name, int result)
{
	const char *text = "unknown error";

	if (!result)
		return;
	((int (*)(int, const char **))find("cuGetErrorString"))(result, &text);
	printf("%s: %d: %s\n", name, result, text);
	exit(1);
}

static void add(void *function, int fault)
{
	static uint32_t from[COUNT], to[COUNT];
	uint64_t a, b, target;
	uint32_t count = COUNT, i;
	void *parameters[] = {&a, &target, &count};

	for (i = 0; i < COUNT; i++) {
		from[i] = i;
		to[i] = 2 * i;
	}
	CUDA(cuMemAlloc_v2, (uint64_t *, size_t), &a, sizeof(from));
	CUDA(cuMemAlloc_v2, (uint64_t *, size_t), &b, sizeof(to));
	CUDA(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t), a, from, sizeof(from));
	CUDA(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t), b, to, sizeof(to));
	target = fault ? NOWHERE : b;
	CUDA(cuLaunchKernel,
	     (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **),
	     function, COUNT / THREADS, 1, 1, THREADS, 1, 1, 0, NULL, parameters, NULL);
	CUDA(cuMemcpyDtoH_v2, (void *, uint64_t, size_t), to, b, sizeof(to));
	for (i = 0; i < COUNT; i++) {
		if (to[i] != 3 * i) {
			printf("%u + %u is not %u\n", i, 2 * i, to[i]);
			exit(1);
		}
	}
	CUDA(cuMemFree_v2, (uint64_t), a);
	CUDA(cuMemFree_v2, (uint64_t), b);
}

static void use(int index, int fault)
{
	void *context, *module, *function;
	unsigned char uuid[16];
	int device, i;

	CUDA(cuDeviceGet, (int *, int), &device, index);
	CUDA(cuDeviceGetUuid, (unsigned char *, int), uuid, device);
	CUDA(cuDevicePrimaryCtxRetain, (void **, int), &context, device);
	CUDA(cuCtxSetCurrent, (void *), context);
	CUDA(cuModuleLoadData, (void **, const void *), &module, ptx);
	CUDA(cuModuleGetFunction, (void **, void *, const char *), &function, module, "sum");
	add(function, fault);
	CUDA(cuModuleUnload, (void *), module);
	CUDA(cuDevicePrimaryCtxRelease_v2, (int), device);
	printf("GPU-");
	for (i = 0; i < 16; i++)
		printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
	printf("\n");
}

int main(int argc, char **argv)
{
	int fault = argc > 1 && !strcmp(argv[1], "fault");
	time_t end = time(NULL) + (argc > 1 ? atoi(argv[1]) : 0);
	int count, index;

	setvbuf(stdout, NULL, _IOLBF, 0);
	library = dlopen("libcuda.so.1", RTLD_NOW);
	if (!library) {
		printf("%s\n", dlerror());
		return 1;
	}
	CUDA(cuInit, (unsigned), 0);
	CUDA(cuDeviceGetCount, (int *), &count);
	if (!count) {
		printf("no GPU\n");
		return 1;
	}
	do {
		for (index = 0; index < count; index++)
			use(index, fault);
	} while (time(NULL) < end);
	return 0;
}
