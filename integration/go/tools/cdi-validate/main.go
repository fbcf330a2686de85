// Command cdi-validate loads CDI specs with the library that container runtimes use and reports the first error.
// A spec of a newer version than it needs is one: older runtimes refuse versions that they do not know. All that have
// CDI know 0.5.0.
package main

import (
	"fmt"
	"os"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

func validate(path string) error {
	spec, err := cdi.ReadSpec(path, 0)
	if err != nil {
		return err
	}
	lowest, err := specs.MinimumRequiredVersion(spec.Spec)
	if err != nil {
		return err
	}
	if spec.Version != lowest && spec.Version != "0.5.0" {
		return fmt.Errorf("cdiVersion is %s, and %s is enough", spec.Version, lowest)
	}
	return nil
}

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: cdi-validate SPEC...")
		os.Exit(2)
	}
	for _, path := range os.Args[1:] {
		if err := validate(path); err != nil {
			fmt.Fprintf(os.Stderr, "cdi-validate: %s: %v\n", path, err)
			os.Exit(1)
		}
	}
}
