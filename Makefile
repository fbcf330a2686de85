# The gate is integration/test; these are short-cuts for hacking.
PYTHON ?= python3

.PHONY: check deb docs lock pins proto release wheel xids

check:  ## unit tests, linters and layers, without root and without a VM
	$(PYTHON) -m pytest

deb:  ## build the Debian packages into dist/
	deploy/build-packages

release:  ## build all files of a release into dist/VERSION/, with their checksums
	deploy/release

wheel:  ## build the agent's wheel into dist/, without its dependencies
	$(PYTHON) -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .

docs:  ## write the generated parts of docs/configuration.md, docs/commands.md and docs/metrics.md
	$(PYTHON) -m tests.project.reference_pages

xids:  ## write NVIDIA's Xid errors again (CATALOGUE=CSV NVERROR=HEADER DATE=YYYY-MM-DD: deploy/generate/xids.py)
	$(PYTHON) -m deploy.generate.xids $(CATALOGUE) $(NVERROR) $(DATE) >xids.tsv
	mv xids.tsv agent/vendors/nvidia/xids.tsv

pins:  ## write deploy/pins again: base image, day of the packages, and toolkit of a release's images (needs skopeo)
	pins=$$(deploy/generate/pins) && echo "$$pins" >deploy/pins

proto:  ## generate the messages of the kubelet's APIs again (needs protoc 3.21: Debian's protobuf-compiler)
	protoc -I. --python_out=. --pyi_out=. agent/dra/kubelet.proto

lock:  ## pin the dependencies again (needs uv)
	uv pip compile -q --upgrade --universal --generate-hashes --python-version 3.11 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" pyproject.toml -o requirements.lock
	uv pip compile -q --upgrade --universal --generate-hashes --python-version 3.11 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" pyproject.toml --group dev --extra dra -o requirements-dev.lock
	$(PYTHON) -c 'import tomllib; \
			print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' | \
		uv pip compile -q --upgrade --universal --generate-hashes --python-version 3.11 --no-emit-index-url \
		--no-emit-find-links --custom-compile-command "make lock" \
		--constraint requirements.lock - -o requirements-build.lock
