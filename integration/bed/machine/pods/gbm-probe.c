/*
 * gbm-probe NODE: make a GBM device of a DRM node with the container's own libgbm, and print its backend's name.
 * libgbm asks the kernel for the node's driver and loads the backend of that name (src/gbm/main/backend.c in Mesa).
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>

int main(int count, char **words)
{
	void *library = dlopen("libgbm.so.1", RTLD_NOW);
	void *(*create)(int);
	const char *(*name)(void *);
	void *device;
	int node;

	if (count != 2) {
		fprintf(stderr, "usage: gbm-probe /dev/dri/renderDN\n");
		return 2;
	}
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	create = (void *(*)(int))dlsym(library, "gbm_create_device");
	name = (const char *(*)(void *))dlsym(library, "gbm_device_get_backend_name");
	node = open(words[1], O_RDWR | O_CLOEXEC);
	if (!create || !name || node < 0) {
		perror(words[1]);
		return 1;
	}
	device = create(node);
	printf("%s\n", device ? name(device) : "no backend");
	return 0;
}
