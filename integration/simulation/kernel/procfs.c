// SPDX-License-Identifier: GPL-2.0 OR MIT
/* Simulation: /proc/driver/nvidia of the stand-in nvidia.ko, in the format of kernel-open/nvidia/nv-procfs.c. */
#include <linux/seq_file.h>

#include "nvidia.h"

static struct proc_dir_entry *root, *gpus_directory;

static int show_version(struct seq_file *file, void *data)
{
	seq_printf(file, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  %s  (simulation)\n", NVIDIA_VERSION);
	seq_printf(file, "GCC version:  gcc version %s\n", __VERSION__);
	return 0;
}

static int show_params(struct seq_file *file, void *data)
{
	seq_puts(file, "ResmanDebugLevel: 4294967295\nRmLogonRC: 1\nModifyDeviceFiles: 1\nDeviceFileUID: 0\n"
		       "DeviceFileGID: 0\nDeviceFileMode: 438\nInitializeSystemMemoryAllocations: 1\n"
		       "UsePageAttributeTable: 4294967295\nEnableMSI: 1\nEnablePCIeGen3: 0\nMemoryPoolSize: 0\n"
		       "DynamicPowerManagement: 3\nEnableGpuFirmware: 18\nEnableDbgBreakpoint: 0\n"
		       "OpenRmEnableUnsupportedGpus: 1\nDmaRemapPeerMmio: 1\n");
	seq_printf(file, "ImexChannelCount: %u\nCreateImexChannel0: 0\n", nvidia_imex_channels());
	seq_puts(file, "CoherentGPUMemoryMode: \"\"\nRegistryDwords: \"\"\nRegistryDwordsPerDevice: \"\"\nRmMsg: \"\"\n"
		       "GpuBlacklist: \"\"\nTemporaryFilePath: \"\"\nExcludedGpus: \"\"\n");
	return 0;
}

/* The UUID follows from the PCI address alone, so that it survives reboots and hot-plug into the same slot. */
static void show_uuid(struct seq_file *file, struct nvidia_gpu *gpu)
{
	struct pci_dev *pdev = gpu->pdev;

	if (!gpu->initialised)
		seq_puts(file, "GPU UUID: \t GPU-????????-????-????-????-????????????\n");
	else
		seq_printf(file, "GPU UUID: \t GPU-51000000-0000-4000-8000-0000%04x%02x%02x\n",
			   pci_domain_nr(pdev->bus), pdev->bus->number, pdev->devfn);
}

static int show_information(struct seq_file *file, void *data)
{
	struct nvidia_gpu *gpu = file->private;
	struct pci_dev *pdev = gpu->pdev;

	seq_puts(file, "Model: \t\t NVIDIA H100 80GB HBM3\n");
	seq_printf(file, "IRQ:   \t\t %u\n", pdev->irq);
	show_uuid(file, gpu);
	seq_printf(file, "Video BIOS: \t %s\n", gpu->initialised ? "96.00.89.00.01" : "??.??.??.??.??");
	seq_puts(file, "Bus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n");
	seq_printf(file, "Bus Location: \t %04x:%02x:%02x.%x\n", pci_domain_nr(pdev->bus), pdev->bus->number,
		   PCI_SLOT(pdev->devfn), PCI_FUNC(pdev->devfn));
	seq_printf(file, "Device Minor: \t %u\n", gpu->minor);
	seq_printf(file, "GPU Firmware: \t %s\n", NVIDIA_VERSION);
	seq_puts(file, "GPU Excluded:\t No\n");
	return 0;
}

void nvidia_procfs_add_gpu(struct nvidia_gpu *gpu)
{
	char name[32];

	snprintf(name, sizeof(name), "%04x:%02x:%02x.%x", pci_domain_nr(gpu->pdev->bus), gpu->pdev->bus->number,
		 PCI_SLOT(gpu->pdev->devfn), PCI_FUNC(gpu->pdev->devfn));
	gpu->proc = proc_mkdir(name, gpus_directory);
	if (gpu->proc)
		proc_create_single_data("information", 0444, gpu->proc, show_information, gpu);
}

void nvidia_procfs_remove_gpu(struct nvidia_gpu *gpu)
{
	proc_remove(gpu->proc);
}

int nvidia_procfs_register(void)
{
	root = proc_mkdir("driver/nvidia", NULL);
	if (!root)
		return -ENOMEM;
	gpus_directory = proc_mkdir("gpus", root);
	if (!gpus_directory || !proc_create_single("version", 0444, root, show_version) ||
	    !proc_create_single("params", 0444, root, show_params) || !nvidia_mig_file(root) ||
	    !nvidia_health_file(root)) {
		proc_remove(root);
		return -ENOMEM;
	}
	return 0;
}

void nvidia_procfs_unregister(void)
{
	proc_remove(root);
}
