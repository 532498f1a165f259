// te_lite._C.CudaMemory: device memory that other processes can map by a file descriptor, a rank's arena or a peer's.
#include "bindings.h"
#include "driver.h"

using namespace te_lite;

namespace {

// All functions throw DriverUnavailable and DriverError. New memory is zero.
class CudaMemory {
 public:
  // Virtual memory management. bytes are rounded up to the device's granularity.
  static std::unique_ptr<CudaMemory> vmm(int device, size_t bytes) {
    std::unique_ptr<CudaMemory> memory(new CudaMemory(device, bytes));
    const PrimaryContext::Scope scope(memory->context_);
    TE_LITE_CHECK(cuMemCreate, &memory->allocation_, memory->bytes_, &memory->properties_, 0);
    memory->map();
    TE_LITE_CHECK(cuMemsetD8, memory->address_, 0, memory->bytes_);
    TE_LITE_CHECK(cuStreamSynchronize, nullptr);  // the memset may return before it is done
    return memory;
  }

  // device: the one that will reach it.
  static std::unique_ptr<CudaMemory> import_fd(int device, int fd, size_t bytes) {
    std::unique_ptr<CudaMemory> memory(new CudaMemory(device, bytes));
    const PrimaryContext::Scope scope(memory->context_);
    void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd));  // the number itself, not its address
    TE_LITE_CHECK(cuMemImportFromShareableHandle, &memory->allocation_, handle, kHandlePosixFd);
    memory->map();
    return memory;
  }

  // Unchecked: nobody could act on a failure, and the driver may have ended before the interpreter does.
  ~CudaMemory() {
    const PrimaryContext::Scope scope(context_);
    if (mapped_) driver().cuMemUnmap(address_, bytes_);
    if (address_) driver().cuMemAddressFree(address_, bytes_);
    if (created_) driver().cuMemRelease(allocation_);
  }

  uint64_t address() const { return address_; }
  size_t bytes() const { return bytes_; }

  int export_fd() const {  // the caller closes it
    const PrimaryContext::Scope scope(context_);
    int fd = -1;
    TE_LITE_CHECK(cuMemExportToShareableHandle, &fd, allocation_, kHandlePosixFd, 0);
    return fd;
  }

 private:
  CudaMemory(int device, size_t bytes)
      : properties_{kAllocationPinned, kHandlePosixFd, {kLocationDevice, device}, nullptr, {}},
        context_(device),
        bytes_(bytes) {
    if (bytes == 0) throw std::invalid_argument("device memory of 0 bytes: at least 1 is needed");
    size_t granularity = 0;
    TE_LITE_CHECK(cuMemGetAllocationGranularity, &granularity, &properties_, kGranularityMinimum);
    bytes_ = (bytes + granularity - 1) / granularity * granularity;
  }

  // The allocation that has just been made or imported.
  void map() {
    created_ = true;
    TE_LITE_CHECK(cuMemAddressReserve, &address_, bytes_, 0, 0, 0);
    TE_LITE_CHECK(cuMemMap, address_, bytes_, 0, allocation_, 0);
    mapped_ = true;
    const CUmemAccessDesc access{properties_.location, kAccessReadWrite};
    TE_LITE_CHECK(cuMemSetAccess, address_, bytes_, &access, 1);
  }

  const CUmemAllocationProp properties_;
  const PrimaryContext context_;
  size_t bytes_;
  // What has been taken so far; the destructor gives it back.
  CUdeviceptr address_ = 0;
  CUallocation allocation_ = 0;
  bool created_ = false;
  bool mapped_ = false;
};

}  // namespace

void bind_cuda_memory(py::module_& m) {
  py::class_<CudaMemory>(m, "CudaMemory", "Device memory that other processes can map. See _C.pyi.")
      .def_static("vmm", &CudaMemory::vmm, "device"_a, "bytes"_a, Unlocked())
      .def_static("import_fd", &CudaMemory::import_fd, "device"_a, "fd"_a, "bytes"_a, Unlocked())
      .def("export_fd", &CudaMemory::export_fd)
      .def_property_readonly("address", &CudaMemory::address)
      .def_property_readonly("bytes", &CudaMemory::bytes);
}
