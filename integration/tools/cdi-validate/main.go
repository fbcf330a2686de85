// Command cdi-validate loads CDI specs with the library that container runtimes use and reports the first error.
package main

import (
	"fmt"
	"os"

	"tags.cncf.io/container-device-interface/pkg/cdi"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: cdi-validate SPEC...")
		os.Exit(2)
	}
	for _, path := range os.Args[1:] {
		if _, err := cdi.ReadSpec(path, 0); err != nil {
			fmt.Fprintf(os.Stderr, "cdi-validate: %s: %v\n", path, err)
			os.Exit(1)
		}
	}
}
