#include "cuda_memory.h"

#include <cstring>

#include "check.h"

namespace te_lite {

CudaMemory::CudaMemory(Kind kind, int device, size_t bytes)
    : kind_(kind), device_(device), cuda_(driver()), context_(device), bytes_(bytes) {
  if (bytes == 0) throw std::invalid_argument("device memory of 0 bytes: at least 1 is needed");
  if (kind != Kind::kVmm) return;
  size_t granularity = 0;
  const CUmemAllocationProp prop = properties();
  TE_LITE_CHECK(cuda_, cuMemGetAllocationGranularity, &granularity, &prop, kGranularityMinimum);
  bytes_ = (bytes + granularity - 1) / granularity * granularity;
}

CUmemAllocationProp CudaMemory::properties() const {
  CUmemAllocationProp prop{};
  prop.type = kAllocationPinned;
  prop.handle_types = kHandlePosixFd;
  prop.location = {kLocationDevice, device_};
  return prop;
}

std::unique_ptr<CudaMemory> CudaMemory::vmm(int device, size_t bytes) {
  std::unique_ptr<CudaMemory> memory(new CudaMemory(Kind::kVmm, device, bytes));
  const PrimaryContext::Scope scope(memory->context_.get());
  const CUmemAllocationProp prop = memory->properties();
  TE_LITE_CHECK(memory->cuda_, cuMemCreate, &memory->allocation_, memory->bytes_, &prop, 0);
  memory->created_ = true;
  memory->map();
  memory->zero();
  return memory;
}

std::unique_ptr<CudaMemory> CudaMemory::import_fd(int device, int fd, size_t bytes) {
  std::unique_ptr<CudaMemory> memory(new CudaMemory(Kind::kVmm, device, bytes));
  const PrimaryContext::Scope scope(memory->context_.get());
  void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd));  // the number itself, not its address
  TE_LITE_CHECK(memory->cuda_, cuMemImportFromShareableHandle, &memory->allocation_, handle, kHandlePosixFd);
  memory->created_ = true;
  memory->map();
  return memory;
}

std::unique_ptr<CudaMemory> CudaMemory::ipc(int device, size_t bytes) {
  std::unique_ptr<CudaMemory> memory(new CudaMemory(Kind::kIpc, device, bytes));
  const PrimaryContext::Scope scope(memory->context_.get());
  TE_LITE_CHECK(memory->cuda_, cuMemAlloc, &memory->address_, memory->bytes_);
  memory->zero();
  return memory;
}

std::unique_ptr<CudaMemory> CudaMemory::open_ipc(int device, const std::string& handle, size_t bytes) {
  CUipcMemHandle name;
  if (handle.size() != sizeof name) {
    throw std::invalid_argument("an IPC handle of " + std::to_string(handle.size()) +
                                " bytes: ipc_handle() gives 64");
  }
  std::memcpy(&name, handle.data(), sizeof name);
  std::unique_ptr<CudaMemory> memory(new CudaMemory(Kind::kOpenedIpc, device, bytes));
  const PrimaryContext::Scope scope(memory->context_.get());
  TE_LITE_CHECK(memory->cuda_, cuIpcOpenMemHandle, &memory->address_, name, kIpcLazyPeerAccess);
  return memory;
}

void CudaMemory::map() {
  TE_LITE_CHECK(cuda_, cuMemAddressReserve, &address_, bytes_, 0, 0, 0);
  TE_LITE_CHECK(cuda_, cuMemMap, address_, bytes_, 0, allocation_, 0);
  mapped_ = true;
  const CUmemAccessDesc access{{kLocationDevice, device_}, kAccessReadWrite};
  TE_LITE_CHECK(cuda_, cuMemSetAccess, address_, bytes_, &access, 1);
}

void CudaMemory::zero() {
  TE_LITE_CHECK(cuda_, cuMemsetD8, address_, 0, bytes_);
  TE_LITE_CHECK(cuda_, cuStreamSynchronize, nullptr);  // the memset may return before it is done
}

int CudaMemory::export_fd() const {
  if (kind_ != Kind::kVmm) throw std::invalid_argument("this memory has no descriptor: export_fd() is for vmm()");
  const PrimaryContext::Scope scope(context_.get());
  int fd = -1;
  TE_LITE_CHECK(cuda_, cuMemExportToShareableHandle, &fd, allocation_, kHandlePosixFd, 0);
  return fd;
}

std::string CudaMemory::ipc_handle() const {
  if (kind_ != Kind::kIpc) throw std::invalid_argument("this memory has no IPC handle: ipc_handle() is for ipc()");
  const PrimaryContext::Scope scope(context_.get());
  CUipcMemHandle handle;
  TE_LITE_CHECK(cuda_, cuIpcGetMemHandle, &handle, address_);
  return std::string(handle.bytes, sizeof handle.bytes);
}

// Unchecked: nobody could act on a failure, and the driver may have ended before the interpreter does.
CudaMemory::~CudaMemory() {
  const PrimaryContext::Scope scope(context_.get());
  if (kind_ == Kind::kIpc && address_) cuda_.cuMemFree(address_);
  if (kind_ == Kind::kOpenedIpc && address_) cuda_.cuIpcCloseMemHandle(address_);
  if (mapped_) cuda_.cuMemUnmap(address_, bytes_);
  if (kind_ == Kind::kVmm && address_) cuda_.cuMemAddressFree(address_, bytes_);
  if (created_) cuda_.cuMemRelease(allocation_);
}

}  // namespace te_lite
