# The library for other programs: make liblossynet. The Makefile includes this file.
#
# liblossynet needs no MPI: ranks meet by TCP (lossynet_rendezvous_open). Where there is MPI, liblossynet_mpi stands
# beside it, which is the same, but its lossynet_bootstrap starts MPI, and it has the link over MPI.
LIBRARY := $(BUILD)/liblossynet
VERSION = $(shell sed -n 's/^\#define LOSSYNET_VERSION "\(.*\)"/\1/p' lossynet/lossynet.h)
LIBRARIES := lossynet $(if $(filter 1,$(MPI)),lossynet_mpi)
LOSSYNET_LIBS := -lm $(if $(filter 1,$(SECURE)),-lcrypto)
LIBRARY_LIBS := $(LOSSYNET_LIBS) $(if $(filter 1,$(VERBS)),$(shell pkg-config --libs libibverbs))
HEADERS := $(LIBRARY)/lossynet.h $(LIBRARY)/lossynet_trainer.h
WITH_MPI := lossynet/bootstrap.c lossynet/link/mpi.c
objects_lossynet_mpi := $(LOSSYNET:%.c=$(BUILD)/%.o)
objects_lossynet := $(if $(filter 1,$(MPI)),$(patsubst %.c,$(BUILD)/%.o,$(filter-out $(WITH_MPI),$(LOSSYNET))) \
                      $(WITH_MPI:%.c=$(BUILD)/alone/%.o),$(objects_lossynet_mpi))
libs_lossynet_mpi := $(MPI_LIBS)

liblossynet: $(foreach library,$(LIBRARIES),$(LIBRARY)/lib$(library).a $(LIBRARY)/lib$(library).so) $(HEADERS)

$(BUILD)/alone/%.o: %.c $(FLAGS)/compile
	@mkdir -p $(@D)
	@echo '  CC   $<, without MPI'
	@$(CC) $(filter-out -DLOSSYNET_MPI,$(CPPFLAGS)) $(C_FLAGS) $(SHARED) -MMD -MP -c $< -o $@

# $(1): the library's name. Exported functions have the version of the library. The archive is one object, whose
# other functions a program's of the same name cannot meet.
define library
$(LIBRARY)/lib$(1).a: $(objects_$(1))
	@mkdir -p $$(@D)
	@echo '  AR   $$@'
	@rm -f $$@
	@$(CC) -r -nostdlib $$^ -o $$(@:.a=.o)
	@$$$$($(CC) -print-prog-name=objcopy) --localize-hidden $$(@:.a=.o)
	@$(AR) rcs $$@ $$(@:.a=.o)

$(LIBRARY)/lib$(1).so: $(objects_$(1)) $(FLAGS)/link
	@mkdir -p $$(@D)
	@echo '  LINK $$@'
	@echo 'LOSSYNET_$$(basename $$(VERSION)) { global: lossynet_*; local: *; };' >$(LIBRARY)/$(1).map
	@$(CC) $(COMMON) $(LDFLAGS) -shared -Wl,-soname,lib$(1).so.$$(basename $$(VERSION)) -Wl,--no-undefined \
	    -Wl,--version-script=$(LIBRARY)/$(1).map $(objects_$(1)) $(LIBRARY_LIBS) $(libs_$(1)) -o $$@
endef
$(foreach name,$(LIBRARIES),$(eval $(call library,$(name))))

# The text of base/types.h is copied into lossynet.h.
$(LIBRARY)/lossynet.h: lossynet/lossynet.h lossynet/base/types.h
	@mkdir -p $(@D)
	@sed -e '/^#include "lossynet\/base\/types.h"/{r lossynet/base/types.h' -e 'd}' $< >$@
	@! grep '^#include "' $@

$(LIBRARY)/lossynet_trainer.h: lossynet/lossynet_trainer.h
	@mkdir -p $(@D)
	@sed 's|^#include "lossynet/lossynet.h"|#include "lossynet.h"|' $< >$@

.PHONY: liblossynet
