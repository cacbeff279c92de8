// A non-owning reference to a callable, for a callee that calls it before returning. Unlike
// std::function it neither copies nor allocates.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace gyre {

template <typename Signature>
class FunctionRef;

template <typename Result, typename... Args>
class FunctionRef<Result(Args...)> {
 public:
    FunctionRef() = default;
    template <typename Callable>
    requires(!std::is_same_v<std::remove_cvref_t<Callable>, FunctionRef>)
        FunctionRef(Callable&& callable)  // NOLINT: implicit, so that callers can pass any callable
        : object_(const_cast<void*>(static_cast<const void*>(std::addressof(callable)))),
          call_([](void* object, Args... args) -> Result {
              return (*static_cast<std::remove_reference_t<Callable>*>(object))(
                  std::forward<Args>(args)...);
          }) {}

    explicit operator bool() const { return call_ != nullptr; }
    Result operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
    void* object_ = nullptr;
    Result (*call_)(void*, Args...) = nullptr;
};

}  // namespace gyre
