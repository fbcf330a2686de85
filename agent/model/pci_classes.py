"""Classes of PCI devices (pci_ids.h in the kernel): base class, subclass and programming interface have 8 bits each."""

DISPLAY = 0x03
"""Base class of display controllers. Their subclass varies: GPUs in processors are VGA controllers; those for data
centres are 3D controllers or other display controllers."""
ACCELERATOR = 0x12
"""Base class of processing accelerators."""
BRIDGE_OTHER = 0x0680
"""Base class and subclass of NVSwitches."""
ENCRYPTION = 0x1080
"""Base class and subclass of encryption controllers, such as the security processor of AMD's processors."""
