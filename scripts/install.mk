# What make install, make dist and make wheel do. The Makefile includes this file.

PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
MANDIR ?= $(PREFIX)/share/man
MANUALS := $(if $(shell command -v help2man),train_llama2.1 tokenize.1)

# Manual pages are what --help prints.
$(BUILD)/train_llama2.1: private HELP := --help-option='--help all' -n 'pretrains Llama-2 over networks that lose packets'
$(BUILD)/tokenize.1: private HELP := -n 'cuts text into tokens for train_llama2' --version-string='$(VERSION)'
$(BUILD)/%.1: $(BUILD)/%
	@echo '  MAN  $@'
	@help2man --no-info --no-discard-stderr $(HELP) $< -o $@

# pkg-config gives these folders to compilers that run elsewhere.
relative = $(filter-out /%,$(firstword $(PREFIX)) $(firstword $(LIBDIR)) $(firstword $(INCLUDEDIR)))
install: all liblossynet $(MANUALS:%=$(BUILD)/%)
	@$(if $(relative),echo 'make install: $(relative): expected folders that begin with /: PREFIX='"'$(abspath $(firstword $(relative)))'" >&2; exit 2)
	@install -d $(foreach folder,"$(BINDIR)" "$(INCLUDEDIR)" "$(LIBDIR)/pkgconfig" "$(MANDIR)/man1","$(DESTDIR)"$(folder))
	@install -m 755 $(BUILD)/train_llama2 $(BUILD)/tokenize "$(DESTDIR)$(BINDIR)"
	@$(if $(MANUALS),install -m 644 $(MANUALS:%=$(BUILD)/%) "$(DESTDIR)$(MANDIR)/man1",echo 'no help2man here: no manual pages')
	@install -m 644 $(HEADERS) "$(DESTDIR)$(INCLUDEDIR)"
	@set -e; for name in $(LIBRARIES); do \
	    install -m 644 $(LIBRARY)/lib$$name.a "$(DESTDIR)$(LIBDIR)"; \
	    install -m 755 $(LIBRARY)/lib$$name.so "$(DESTDIR)$(LIBDIR)/lib$$name.so.$(VERSION)"; \
	    ln -sf lib$$name.so.$(VERSION) "$(DESTDIR)$(LIBDIR)/lib$$name.so.$(basename $(VERSION))"; \
	    ln -sf lib$$name.so.$(basename $(VERSION)) "$(DESTDIR)$(LIBDIR)/lib$$name.so"; \
	    libs=; [ $$name = lossynet ] || libs='$(libs_lossynet_mpi)'; \
	    printf '%s\n' 'prefix=$(PREFIX)' 'libdir=$(LIBDIR)' 'includedir=$(INCLUDEDIR)' "Name: $$name" \
	        'Version: $(VERSION)' 'Description: averages and broadcasts vectors over a network that loses packets' \
	        'Requires.private: $(if $(filter 1,$(SECURE)),libcrypto) $(if $(filter 1,$(VERBS)),libibverbs)' \
	        'Cflags: -I"$${includedir}"' "Libs: -L\"\$${libdir}\" -l$$name" "Libs.private: -fopenmp -lm $$libs" \
	        | install -m 644 /dev/stdin "$(DESTDIR)$(LIBDIR)/pkgconfig/$$name.pc"; done

uninstall:
	@for name in train_llama2 tokenize; do \
	    rm -f "$(DESTDIR)$(BINDIR)/$$name" "$(DESTDIR)$(MANDIR)/man1/$$name.1"; done
	@rm -f "$(DESTDIR)$(INCLUDEDIR)"/lossynet.h "$(DESTDIR)$(INCLUDEDIR)"/lossynet_trainer.h
	@for name in lossynet lossynet_mpi; do rm -f "$(DESTDIR)$(LIBDIR)"/lib$$name.a "$(DESTDIR)$(LIBDIR)"/lib$$name.so* \
	    "$(DESTDIR)$(LIBDIR)"/pkgconfig/$$name.pc; done

dist:
	@mkdir -p $(BUILD)
	@git archive --format=tar.gz --prefix=train_llama2-$(VERSION)/ -o $(BUILD)/train_llama2-$(VERSION).tar.gz HEAD
	@echo $(BUILD)/train_llama2-$(VERSION).tar.gz

# The package for Python: a wheel for every Python 3, and an archive of its sources. auditwheel, where it is installed,
# adds the libraries that other systems may lack.
wheel:
	@mkdir -p $(BUILD)/wheel
	@cd lossynet/python && $(PYTHON) setup.py --quiet egg_info --egg-base '$(abspath $(BUILD))/wheel' \
	    build --build-base '$(abspath $(BUILD))/wheel' --build-temp '$(abspath $(BUILD))/python' \
	    sdist --dist-dir '$(abspath $(BUILD))/wheel' bdist_wheel --dist-dir '$(abspath $(BUILD))/wheel'
	@! command -v auditwheel >/dev/null || auditwheel repair -w $(BUILD)/wheel $(BUILD)/wheel/lossynet-*-linux_*.whl
	@ls $(BUILD)/wheel/lossynet-*.whl $(BUILD)/wheel/lossynet-*.tar.gz

.PHONY: install uninstall dist wheel
