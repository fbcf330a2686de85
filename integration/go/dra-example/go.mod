// Only its demo is used: pods and claims for any driver.
module unbounded-agent/integration/go/dra-example

go 1.26.2

require sigs.k8s.io/dra-example-driver v0.2.0
