// A header that Gloo's own headers include and that its installation (Debian's, too) leaves out:
// what they need of it to declare their members. Gloo has defined these classes so since 2019.
#pragma once

#include <memory>

namespace gloo {

template <typename T>
class NonOwningPtr;

template <typename T>
class WeakNonOwningPtr final {
    std::weak_ptr<T> ptr_;
};

}  // namespace gloo
